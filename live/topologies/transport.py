"""Messages between roles, their bytes, and the seam between a role and what carries its messages.

A message is a header of integers and a few tensors. Which tensors a message of some kind has, their types, and how many
rows they have at most is known to both sides beforehand (`Form`): nothing in a message says how it is to be read, and
nothing is unpickled. As bytes it is a header of 16 integers and then the tensors, each at its exact number of rows.
Tensors of the workers' devices may travel apart (`live.topologies.sockets`); the header has their rows all the
same.

Requests and tokens travel as tensors, too. A `Generation` crosses with all that decides its tokens. The client's side
of it stays behind: its stop check, and its times.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch

from kernels.sampling import SamplingParams
from live.generation import FinishReason, Generation
from workloads.errors import TwinError
from workloads.request import TASKS, Request

STOP, IDLE = 0, 1
"""Kinds of messages that every topology has. STOP: the receiver ends; a second one changes nothing. IDLE: the sender
has nothing to do and is alive. Neither has fields or tensors."""

FIELDS, PAYLOADS = 6, 8
"""The most fields and tensors of a message."""

HEADER = 1 + FIELDS + PAYLOADS + 1
"""Integers of a header: kind, fields, rows of each tensor, and the bytes of the whole message."""

HEADER_BYTES = 8 * HEADER

ALIGNMENT = 16
"""Bytes that the beginning of a tensor in a buffer is a multiple of."""


class TransportError(TwinError):
    """A role cannot go on: a peer has ended, does not answer, or sends what it must not."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A tensor of a message: up to `rows` rows of the shape `row`; on the host, or for both sides on a device."""

    dtype: torch.dtype
    rows: int
    row: tuple[int, ...] = ()
    on_device: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * torch.Size(self.row).numel()


@dataclass(frozen=True, slots=True)
class Form:
    """The parts of messages of one kind: this many integer fields, and these tensors, in order."""

    fields: int = 0
    payloads: tuple[Payload, ...] = ()


Forms: TypeAlias = Mapping[int, Form]
"""The forms of a topology's messages, by kind."""

COMMON_FORMS: Forms = {STOP: Form(), IDLE: Form()}


@dataclass(frozen=True, slots=True)
class Message:
    """One message, as its form says. Received tensors are valid until the next message from the same source."""

    kind: int
    fields: tuple[int, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def check_message(message: Message, forms: Forms) -> None:
    """Raise a `TransportError` for a message that has not the form of its kind."""
    form = forms.get(message.kind)
    if form is None:
        raise TransportError(f"a message of kind {message.kind}: expected one of {sorted(forms)}")
    counts, expected = (len(message.fields), len(message.tensors)), (form.fields, len(form.payloads))
    if counts != expected:
        raise TransportError(
            f"a message of kind {message.kind}: expected {expected} fields and tensors, found {counts}"
        )
    for i, (tensor, payload) in enumerate(zip(message.tensors, form.payloads, strict=True)):
        found_type = (tensor.dtype, *tensor.shape[1:])
        if found_type != (payload.dtype, *payload.row) or not tensor.shape[0] <= payload.rows:
            raise TransportError(
                f"tensor {i} of a message of kind {message.kind}: expected up to {payload.rows} rows of "
                f"{list(payload.row)} {payload.dtype}, found {list(tensor.shape)} {tensor.dtype}"
            )


ReceiveApart: TypeAlias = Callable[[list[tuple[int, Payload, int]]], list[torch.Tensor]]
"""Receives the tensors that travel apart: (place in the message, payload, rows) of each."""


def capacity(forms: Forms) -> int:
    """Bytes of the largest message that the forms allow."""
    return HEADER_BYTES + max(sum(_aligned(p.rows * p.row_bytes) for p in form.payloads) for form in forms.values())


def select(message: Message, form: Form, *, on_device: bool) -> list[torch.Tensor]:
    """The tensors of a message that are on the workers' devices, or on the host."""
    pairs = zip(message.tensors, form.payloads, strict=True)
    return [tensor for tensor, payload in pairs if payload.on_device == on_device]


def pack(message: Message, apart: Form | None = None) -> torch.Tensor:
    """A message as bytes. `apart`: its form, whose tensors of devices are left out."""
    rows = [tensor.shape[0] for tensor in message.tensors]
    header = [message.kind, *message.fields, *[0] * (FIELDS - len(message.fields)), *rows]
    tensors = message.tensors if apart is None else select(message, apart, on_device=False)
    sizes = [_aligned(tensor.nbytes) for tensor in tensors]
    buffer = torch.empty(HEADER_BYTES + sum(sizes), dtype=torch.uint8)
    header += [0] * (HEADER - 1 - len(header)) + [buffer.nbytes]
    buffer[:HEADER_BYTES].view(torch.int64).copy_(torch.tensor(header))
    begin = HEADER_BYTES
    for tensor, size in zip(tensors, sizes, strict=True):
        buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        begin += size
    return buffer


def unpack(buffer: torch.Tensor, forms: Forms, apart: ReceiveApart | None = None) -> Message:
    """The message at the beginning of a buffer, as views of it; `apart` receives tensors of devices that are not in it.

    Raises a `TransportError` for an unknown kind, or more rows than its form allows.
    """
    kind, *header = buffer[:HEADER_BYTES].view(torch.int64).tolist()
    form: Form | None = forms.get(kind)
    if form is None:
        raise TransportError(f"a message of kind {kind}: expected one of {sorted(forms)}")
    begin, tensors = HEADER_BYTES, []
    following: list[tuple[int, Payload, int]] = []
    for place, (payload, rows) in enumerate(zip(form.payloads, header[FIELDS:], strict=False)):
        if not 0 <= rows <= payload.rows:
            raise TransportError(f"a message of kind {kind} with {rows} rows: expected at most {payload.rows}")
        if apart is not None and payload.on_device:
            following.append((place, payload, rows))
            continue
        end = begin + rows * payload.row_bytes
        tensors.append(buffer[begin:end].view(payload.dtype).view(rows, *payload.row))
        begin += _aligned(end - begin)
    if apart is not None and following:
        for (place, _, _), tensor in zip(following, apart(following), strict=True):
            tensors.insert(place, tensor)
    return Message(kind, tuple(header[: form.fields]), tuple(tensors))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Receive:
    """A role waits for the next message of one source, by rank."""

    source: int


@dataclass(frozen=True, slots=True)
class ReceiveAny:
    """A role takes the first message of several sources, or None if there is none and it does not `wait`.

    Rank 0 may get None even so: it is woken, or should show that it is alive. `patient`: without a time limit.
    """

    sources: tuple[int, ...]
    wait: bool
    patient: bool = False


@dataclass(frozen=True, slots=True)
class Idle:
    """A role has nothing to do until it is resumed, with None: by a client's request, or to show that it is alive."""


@dataclass(frozen=True, slots=True)
class Computing:
    """A role waits for the kernels that it has launched, while other roles of its process go on. It gets None."""

    done: Callable[[], bool]
    wait: Callable[[], None]

    @classmethod
    def launched(cls) -> Computing:
        """The kernels on the present CUDA stream."""
        event = torch.cuda.Event()
        event.record()
        return cls(event.query, event.synchronize)


Wait: TypeAlias = Receive | ReceiveAny | Idle | Computing
"""An event that a role may wait for."""

Role: TypeAlias = Generator[Wait, Message | None, None]
"""A worker's life. It yields what it waits for, and gets the message (None for `Idle` and `Computing`)."""


class Transport(Protocol):
    """The means by which a role of this rank sends."""

    @property
    def rank(self) -> int: ...

    def send(self, destination: int, message: Message) -> None:
        """Send a message with its tensors; `TransportError` if its form is wrong or the destination does not read."""

    def clock(self) -> float:
        """The role's time, seconds."""


def received(message: Message | None) -> Message:
    """The message that a role has waited for by `Receive`."""
    assert message is not None, "a named source always has a message"
    return message


REQUEST = np.dtype(
    [(name, "<i8") for name in (
        "id", "prompt_tokens", "max_tokens", "min_tokens", "top_k", "end_tokens", "prefix_blocks", "task",
        "first_token", "priority", "logprobs", "lane",
    )]
    + [("seed", "<u8"), ("temperature", "<f8"), ("top_p", "<f8"), ("min_p", "<f8")]
)  # fmt: skip
"""The row of a request. `first_token`: -1 without output. `lane`: a number that tells its receiver where it belongs."""

WORD = 1 << 64

FINISH_REASONS: tuple[FinishReason, ...] = ("", "stop", "length", "abort")
"""By the code that stands for them in a message."""


MAX_END_TOKENS = 256
"""End tokens of one request, at most."""


def request_payloads(requests: int, prompt_tokens: int, prefix_blocks: int) -> tuple[Payload, ...]:
    """Requests as tensors: this many, with this many prompt tokens and prefix blocks each.

    They are rows of `REQUEST`, and the prompt tokens, end tokens and prefix ids (128 bits each) of all.
    """
    return (
        Payload(torch.int64, requests, (REQUEST.itemsize // 8,)),
        Payload(torch.int64, requests * prompt_tokens),
        Payload(torch.int64, requests * MAX_END_TOKENS),
        Payload(torch.int64, requests * prefix_blocks, (2,)),
    )


def pack_requests(requests: Sequence[tuple[Generation, int]]) -> tuple[torch.Tensor, ...]:
    """The tensors of some requests, each with a number that tells its receiver where it belongs."""
    rows, ends = [], list[int]()
    ids: list[tuple[int, int]] = []
    for generation, lane in requests:
        request, params = generation.request, generation.sampling_params
        rows.append((
            request.id, request.prompt_tokens, request.max_tokens, generation.min_tokens, params.top_k,
            len(generation.end_tokens), len(request.prefix_blocks), TASKS.index(request.task),
            generation.output[0] if generation.output else -1, request.priority, generation.logprobs, lane,
            params.seed % WORD, params.temperature, params.top_p, params.min_p,
        ))  # fmt: skip
        ends += sorted(generation.end_tokens)
        ids += [(block % WORD, block // WORD) for block in request.prefix_blocks]
    prompts = [generation.prompt for generation, _ in requests]
    columns = (
        np.array(rows, dtype=REQUEST).view(np.int64).reshape(-1, REQUEST.itemsize // 8),
        np.concatenate(prompts) if prompts else np.empty(0, dtype=np.int64),
        np.array(ends, dtype=np.int64),
        np.array(ids, dtype=np.uint64).view(np.int64).reshape(-1, 2),
    )
    return tuple(map(torch.from_numpy, columns))


def unpack_requests(
    table: torch.Tensor, prompts: torch.Tensor, end_tokens: torch.Tensor, prefix_ids: torch.Tensor
) -> list[tuple[Generation, int]]:
    """The requests of a message, each with its number."""
    unpacked = []
    tokens, ends = prompts.numpy().copy(), end_tokens.tolist()
    ids = prefix_ids.numpy().view(np.uint64).tolist()
    token = end = block = 0
    for (row,) in table.numpy().view(REQUEST).tolist():
        request_id, prompt, max_tokens, min_tokens, top_k, num_ends, num_blocks, task, first, *rest = row
        priority, logprobs, lane, seed, temperature, top_p, min_p = rest
        prefix = tuple(low + high * WORD for low, high in ids[block : block + num_blocks])
        generation = Generation(
            Request(request_id, 0.0, prompt, max_tokens, prefix_blocks=prefix, task=TASKS[task], priority=priority),
            tokens[token : token + prompt],
            SamplingParams(temperature, top_k, top_p, min_p, seed),
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
