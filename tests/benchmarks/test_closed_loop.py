"""The closed form, beside its formula and beside a loop that is stepped through."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import cast

import numpy as np
import pytest

from benchmarks.closed_loop import closed_loop
from latency_models.sources.linear import LinearStepTime
from latency_models.step_time import StepTime
from schedulers.batches import Batch, Chunk, MixedBatch
from schedulers.sequence import Sequence
from workloads.errors import BadInput
from workloads.request import Request

STEP = LinearStepTime(10e-3, 20e-6, 1e-8)
CONSTANT = LinearStepTime(10e-3, 0.0)


def stepped(step_time: StepTime, concurrency: int, isl: int, osl: int, rounds: int = 6) -> tuple[float, float]:
    """(TTFT, TPOT) of a loop that starts with its requests at even stages of their lives, one prompt a step.

    The first round is left out.
    """
    sequence = Sequence(Request(0, 0.0, 1, 1), 0, False)
    generated = {number: 1 + number * (osl - 1) // concurrency for number in range(concurrency)}
    transfer = dict.fromkeys(generated, 0.0)
    first, waiting, now = dict(transfer), list[int](), 0.0
    ttft: list[float] = []
    tpot: list[float] = []
    number = concurrency
    while len(tpot) < rounds * concurrency:
        prompts = [Chunk(sequence, isl, 0, True)] if waiting else []
        kv = sum(isl + process for process in generated.values())
        running = cast("Many[Sequence]", range(len(generated)))
        now += step_time.seconds(MixedBatch(prompts, running, kv, kv))
        for single in list(generated):
            generated[single] += 1
            if generated[single] >= osl:
                del generated[single]
                ttft.append(first[single] - transfer[single])
                tpot.append((now - first[single]) / (osl - 1))
                waiting.append(number)
                transfer[number] = now
                number += 1
        if prompts:
            single = waiting.pop(0)
            generated[single], first[single] = 1, now
    return float(np.mean(ttft[concurrency:])), float(np.mean(tpot[concurrency:]))


@pytest.mark.parametrize(
    ("concurrency", "isl", "osl"), [(1, 500, 100), (8, 1000, 200), (32, 2000, 128), (64, 300, 512)]
)
def test_a_loop_that_is_stepped_through_agrees(concurrency: int, isl: int, osl: int) -> None:
    ttft, tpot = stepped(STEP, concurrency, isl, osl)
    result = closed_loop(STEP, concurrency, isl, osl)
    assert result.tpot == pytest.approx(tpot, rel=0.02)
    assert result.ttft == pytest.approx(ttft, rel=0.02)


def test_a_life_is_its_own_steps_and_every_prompt() -> None:
    result = closed_loop(STEP, 16, 1000, 100, ahead=3)
    assert result.decode_step == pytest.approx(10e-3 + 20e-6 * result.decoding + 1e-8 * result.decoding * 1050)
    assert result.prompt == pytest.approx(20e-6 * 1000)
    assert result.ttft == pytest.approx(result.decode_step + 4 * result.prompt)
    assert result.tpot == pytest.approx(result.decode_step + 12 * result.prompt / 99)
    assert result.ttft + 99 * result.tpot == pytest.approx(100 * result.decode_step + 16 * result.prompt)


def test_nobody_is_ahead_of_the_only_request_nor_more_than_there_are() -> None:
    separate = closed_loop(STEP, 1, 1000, 100, ahead=5)
    assert separate.tpot == separate.decode_step
    assert closed_loop(STEP, 4, 1000, 100, ahead=50) == closed_loop(STEP, 4, 1000, 100, ahead=3)


def test_long_prompts_go_in_chunks() -> None:
    quadratic = LinearStepTime(1e-3, 0.0, 0.0, 1e-6)
    complete, chunked = (closed_loop(quadratic, 4, 3000, 50, max_batched_tokens=room) for room in (8192, 1000))
    assert chunked.prompt == pytest.approx(complete.prompt)  # attention over all of it, in however many parts

    class Launches(LinearStepTime):
        """Half a second more for each step with prompts."""

        def seconds(self, batch: Batch) -> float:
            return super().seconds(batch) + (0.5 if batch.chunks else 0.0)

    loops = [closed_loop(Launches(1.0, 0.0), 4, 3000, 50, max_batched_tokens=room) for room in (8192, 2000, 1004)]
    assert [loop.prompt for loop in loops] == [0.5, 1.0, 1.5]


def test_requests_that_the_cache_cannot_hold_wait_for_their_first_token() -> None:
    free = closed_loop(CONSTANT, 10, 1000, 200)
    covered = closed_loop(CONSTANT, 20, 1000, 200, kv_capacity=11_000)
    assert covered.residents == 10
    assert covered.tpot == free.tpot
    assert covered.ttft == pytest.approx(free.ttft + 200 * 10e-3)
    assert closed_loop(CONSTANT, 20, 1000, 200, kv_capacity=5.0).residents == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 10, 10), "concurrency: got 0, expected at least 1"),
        ((4, 0, 10), "isl: got 0, expected at least 1"),
        ((4, 10, 1), "osl: got 1, expected at least 2"),
        ((4, 10, float("nan")), "osl: got nan, expected at least 2"),
    ],
)
def test_what_is_no_loop_is_refused(sizes: tuple[float, float, float], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        closed_loop(STEP, *sizes)


def test_a_step_without_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(BadInput, match=r"max_batched_tokens: got 16, expected more than the 16 tokens of the decodes"):
        closed_loop(STEP, 16, 100, 100, max_batched_tokens=16)
