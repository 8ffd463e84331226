"""Requests and tokens as tensors, so that they can be sent between processes.

A `Generation` crosses with all that decides its tokens. The client's side of it stays behind: its stop check, and its
times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from kernels.sampling import SamplingParams
from live.generation import FinishReason, Generation
from live.topologies.transport import Message, Payload
from workloads.request import TASKS, Request

COLUMNS = 13
"""Integers of a request: id, prompt tokens, max_tokens, min_tokens, top_k, seed, end tokens, prefix ids, task, first
output token, priority, log-probabilities wanted, and a number that tells its receiver where it belongs.
"""

WORD = 1 << 64

FINISH_REASONS: tuple[FinishReason, ...] = ("", "stop", "length", "abort")
"""By the code that stands for them in a message."""


class PackedRequests(NamedTuple):
    """Requests as tensors.

    Attributes:
        numbers: (requests, COLUMNS) int64. fractions: (requests, 3) float64: temperature, top_p, min_p.
        tokens: (prompt tokens of all,) int64. end_tokens: (end tokens of all,) int64.
        prefix_ids: (prefix blocks of all, 2) int64, 128 bits each.
    """

    numbers: torch.Tensor
    fractions: torch.Tensor
    tokens: torch.Tensor
    end_tokens: torch.Tensor
    prefix_ids: torch.Tensor


def request_payloads(requests: int, prompt_tokens: int, prefix_blocks: int) -> tuple[Payload, ...]:
    """The payloads of `PackedRequests`: this many requests, with this many prompt tokens and prefix blocks each."""
    return (
        Payload(torch.int64, requests, (COLUMNS,)),
        Payload(torch.float64, requests, (3,)),
        Payload(torch.int64, requests * prompt_tokens),
        Payload(torch.int64, requests * MAX_END_TOKENS),
        Payload(torch.int64, requests * prefix_blocks, (2,)),
    )


MAX_END_TOKENS = 256
"""End tokens of one request, at most."""


def pack_requests(generations: Sequence[Generation], lanes: Sequence[int]) -> PackedRequests:
    """The tensors of some requests, each with a number that tells its receiver where it belongs."""
    numbers, ids, ends = [], [], []
    for generation, lane in zip(generations, lanes, strict=True):
        request, params = generation.request, generation.sampling_params
        numbers.append(
            [
                request.id, request.prompt_tokens, request.max_tokens, generation.min_tokens, params.top_k,
                _signed(params.seed), len(generation.end_tokens), len(request.prefix_blocks),
                TASKS.index(request.task), generation.output[0] if generation.output else -1, request.priority,
                generation.logprobs, lane,
            ]
        )  # fmt: skip
        ends += sorted(generation.end_tokens)
        ids += [[_signed(block % WORD), _signed(block // WORD)] for block in request.prefix_blocks]
    samplings = [generation.sampling_params for generation in generations]
    prompts = [torch.from_numpy(generation.prompt) for generation in generations]
    return PackedRequests(
        torch.tensor(numbers, dtype=torch.int64).reshape(-1, COLUMNS),
        torch.tensor([[p.temperature, p.top_p, p.min_p] for p in samplings], dtype=torch.float64).reshape(-1, 3),
        torch.cat(prompts) if prompts else torch.empty(0, dtype=torch.int64),
        torch.tensor(ends, dtype=torch.int64),
        torch.tensor(ids, dtype=torch.int64).reshape(-1, 2),
    )


def unpack_requests(packed: PackedRequests) -> list[tuple[Generation, int]]:
    """The requests of a message, each with its number."""
    unpacked = []
    tokens = packed.tokens.numpy().copy()
    ends, ids = packed.end_tokens.tolist(), packed.prefix_ids.tolist()
    token = end = block = 0
    for row, (temperature, top_p, min_p) in zip(packed.numbers.tolist(), packed.fractions.tolist(), strict=True):
        request_id, prompt, max_tokens, min_tokens, top_k, seed, num_ends, num_blocks, task, first, *rest = row
        priority, logprobs, lane = rest
        prefix = tuple((low % WORD) + (high % WORD) * WORD for low, high in ids[block : block + num_blocks])
        generation = Generation(
            Request(request_id, 0.0, prompt, max_tokens, prefix_blocks=prefix, task=TASKS[task], priority=priority),
            tokens[token : token + prompt],
            SamplingParams(temperature, top_k, top_p, min_p, seed % WORD),
            frozenset(ends[end : end + num_ends]),
            min_tokens,
            logprobs=logprobs,
            output=[] if first < 0 else [first],
        )
        token, end, block = token + prompt, end + num_ends, block + num_blocks
        unpacked.append((generation, lane))
    return unpacked


TOKEN_COLUMNS = 3
"""Integers of an output token: request id, token, code of the finish reason (`FINISH_REASONS`)."""

MOST_LOGPROBS = 20
"""Most likely tokens of one output token, at most."""


def token_payloads(sequences: int) -> tuple[Payload, ...]:
    """Payloads of output tokens, then of their log-probabilities: (request id, count), values, and token ids."""
    max_logprobs = sequences * MOST_LOGPROBS
    return (
        Payload(torch.int64, sequences, (TOKEN_COLUMNS,)),
        Payload(torch.int64, sequences, (2,)),
        Payload(torch.float32, sequences + max_logprobs),
        Payload(torch.int64, max_logprobs),
    )


def pack_tokens(generations: Sequence[Generation]) -> tuple[torch.Tensor, ...]:
    """The last output token of each generation."""
    tokens = [
        (generation.request.id, generation.output[-1], FINISH_REASONS.index(generation.finish_reason))
        for generation in generations
    ]
    rows: list[tuple[int, int]] = []
    values: list[float] = []
    ids: list[int] = []
    for generation in generations:
        if generation.logprobs >= 0:
            top = generation.top_logprobs[-1]
            rows.append((generation.request.id, len(top)))
            values += [generation.token_logprobs[-1], *(value for _, value in top)]
            ids += [token for token, _ in top]
    return (
        torch.tensor(tokens, dtype=torch.int64).reshape(-1, TOKEN_COLUMNS),
        torch.tensor(rows, dtype=torch.int64).reshape(-1, 2),
        torch.tensor(values, dtype=torch.float32),
        torch.tensor(ids, dtype=torch.int64),
    )


def read_tokens(message: Message, generations: Mapping[int, Generation]) -> list[list[int]]:
    """The tokens of a message, as lists of TOKEN_COLUMNS; appends their log-probabilities to the generations."""
    tokens, rows, values, ids = (tensor.tolist() for tensor in message.tensors)
    value = place = 0
    for request_id, count in rows:
        if (generation := generations.get(request_id)) is not None:
            generation.token_logprobs.append(values[value])
            top = values[value + 1 : value + 1 + count]
            generation.top_logprobs.append(list(zip(ids[place : place + count], top, strict=True)))
        value, place = value + 1 + count, place + count
    return tokens


def append_token(generation: Generation, token: int, code: int, now: float) -> bool:
    """Append a token that a worker has sampled, with its finish reason's code; returns whether the output has ended."""
    generation.output.append(token)
    generation.last_token = now
    if generation.first_token < 0:
        generation.first_token = now
    checked = token in generation.end_tokens or generation.stop_check is not None
    if checked and generation.ends_with(token):
        generation.finish_reason = "stop"
    elif code:
        generation.finish_reason = FINISH_REASONS[code]
    return bool(generation.finish_reason)


def _signed(value: int) -> int:
    """64 bits as int64 has them."""
    return value - WORD if value >= WORD >> 1 else value
