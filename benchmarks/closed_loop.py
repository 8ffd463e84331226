"""The steady state of a closed loop of equal requests, in closed form from an engine's step times."""

from __future__ import annotations

from dataclasses import dataclass

from latency_models.step_time import StepTime
from workloads.errors import BadInput

ROUNDS = 4
"""Iterations after which the number of decoding requests has settled."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A steady state, mean times in seconds; `decode_step` is D, `prompt` P.

    `residents`: requests that the KV cache holds at once. `decoding`: of these, the mean number past their first token.
    """

    ttft: float
    tpot: float
    decode_step: float
    prompt: float
    residents: float
    decoding: int


def closed_loop(
    step_time: StepTime,
    concurrency: float,
    isl: float,
    osl: float,
    *,
    ahead: float = 0.0,
    max_batched_tokens: int = 8192,
    kv_capacity: float | None = None,
) -> ClosedLoop:
    """Steady state of `concurrency` requests with `isl` prompt and `osl` output tokens each; means are accepted.

    `ahead`: prompts prefilled between a request's submission and its first token. `kv_capacity`: tokens that the KV
    cache holds; requests beyond it wait, as part of their TTFT.
    """
    for name, value, minimum in (("concurrency", concurrency, 1), ("isl", isl, 1), ("osl", osl, 2)):
        if not value >= minimum:
            raise BadInput(f"expected at least {minimum}", field=name, value=value)
    mean_kv = isl + osl / 2
    residents = concurrency if kv_capacity is None else max(min(concurrency, kv_capacity / mean_kv), 1.0)
    peers = residents - 1
    before = min(max(ahead, 0.0), peers)
    decoding = max(round(residents), 1)
    for _ in range(ROUNDS):
        step, prompt = step_and_prompt(step_time, decoding, isl, osl, max_batched_tokens)
        ttft = step + (1 + before) * prompt
        tpot = step + (peers - before) * prompt / (osl - 1)
        life = ttft + (osl - 1) * tpot
        decoding = max(round(residents * (1 - ttft / life)), 1)
    waiting = (concurrency - residents) / residents * life
    return ClosedLoop(ttft + waiting, tpot, step, prompt, residents, decoding)


def step_and_prompt(
    step_time: StepTime, decoding: int, isl: float, osl: float, max_batched_tokens: int
) -> tuple[float, float]:
    """D and P, seconds, while `decoding` requests are past their first token."""
    kv = round(decoding * (isl + osl / 2))
    step = step_time.decode_seconds(decoding, kv, round(isl + osl), 1)[0]
    return step, _prompt_seconds(step_time, decoding, kv, round(isl), max_batched_tokens)


def _prompt_seconds(step_time: StepTime, decodes: int, kv: int, isl: int, max_batched_tokens: int) -> float:
    """Seconds that one prompt adds to the decode steps that its chunks run in."""
    room = max_batched_tokens - decodes
    if room < 1:
        expected = f"expected more than the {decodes} tokens of the decodes"
        raise BadInput(expected, field="max_batched_tokens", value=max_batched_tokens)
    decode_step = step_time.decode_seconds(decodes, kv, kv, 1)[0]
    added, context = 0.0, 0
    while context < isl:
        tokens = min(room, isl - context)
        last = context + tokens == isl
        added += step_time.mixed_seconds(decodes, kv, kv, context, tokens, last) - decode_step
        context += tokens
    return added


def prompt_alone(step_time: StepTime, tokens: int, max_batched_tokens: int) -> float:
    """Seconds of one prompt in steps without decodes, as a prefill engine computes it."""
    seconds, context = 0.0, 0
    while context < tokens:
        size = min(max_batched_tokens, tokens - context)
        seconds += step_time.mixed_seconds(0, 0, 0, context, size, last=context + size == tokens)
        context += size
    return seconds
