"""The yardstick, and the clock that stands still while it is read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.shapes import Shape
from live.engine import Engine
from live.models.config import ModelConfig
from live.models.decoder import Decoder
from live.models.weights import DenseFFN, random_weights
from live.validation import pace
from live.validation import play as playing
from live.validation.pace import PacedClock
from live.validation.plant import LivePlant
from live.validation.play import play
from live.validation.prompts import materialise
from schedulers.engine_config import EngineConfig
from workloads.request import Request

CONFIG = ModelConfig("llama", Shape(2, 32, 48, 4, 2, 8, 50), positions=128, tied=False)


def decoder() -> Decoder:
    torch.set_num_threads(1)
    return Decoder(CONFIG, random_weights(CONFIG, torch.float32, "cpu"))


def engine() -> Engine:
    return Engine(decoder(), EngineConfig(kv_blocks=16, max_num_seqs=2))


class Time:
    """A clock that goes by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class PassingTime(Time):
    """A clock that goes on by 10 µs whenever somebody looks, and by what anybody sleeps."""

    def perf_counter(self) -> float:
        self.now += 1e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> PassingTime:
    """The time of whatever is played, so that no pause of this machine is in it."""
    time = PassingTime()
    monkeypatch.setattr(pace, "time", time)
    monkeypatch.setattr(playing, "time", time)
    return time


def test_the_clock_stands_still_while_the_pace_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr(pace, "time", time)

    def yardstick(rows: int) -> float:
        time.now += 0.25
        return 0.2

    clock = PacedClock(yardstick, share=0.125, sizes=[4])
    clock.rest(3)
    assert clock() == 0.0
    assert clock.readings == [(0.0, 4, 0.2)]
    time.now += 1.5
    clock.rest(3)  # an eighth of the time: not before 2 s have gone by, of which the clock stood still for 0.25
    assert clock() == 1.5
    time.now += 0.25
    clock.rest(3)
    assert clock() == 1.75
    assert clock.readings == [(0.0, 4, 0.2), (1.75, 4, 0.2)]
    plain = PacedClock()
    time.now += 9.0
    plain.rest(3)
    assert (plain(), plain.readings) == (9.0, [])


def test_readings_go_with_the_steps_that_have_just_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size once, then the nearest: an eighth of the time of each, or one a step where that is less."""
    time = Time()
    monkeypatch.setattr(pace, "time", time)

    def yardstick(rows: int) -> float:
        time.now += rows / 1024
        return rows / 1024

    clock = PacedClock(yardstick, share=0.125, sizes=[1, 8, 64])

    def steps(rows: int, seconds: float) -> list[int]:
        before, begin = len(clock.readings), time.now
        while time.now < begin + seconds:
            time.now += 1 / 64
            clock.rest(rows)
        return [size for _, size, _ in clock.readings[before:]]

    assert steps(1, 0.1)[:3] == [1, 8, 64]
    assert steps(1, 17.0) == [1] * 1024  # each 16 and its reading 1 / 1024 s
    large = steps(40, 20.0)
    assert set(large) == {64}
    assert len(large) / 16 == pytest.approx(0.125 * 20.0, rel=0.05)
    assert steps(1, 0.16) == [1] * 10  # at once again, though a large one was read not long ago
    time.now += 1000.0
    assert steps(1, 0.16) == [1] * 10  # a wait is not made up for


@pytest.mark.parametrize(("family", "quantise"), [("qwen3", None), ("qwen3", {"group": -1}), ("qwen3_moe", None)])
def test_every_model_has_a_yardstick(tmp_path: Path, family: str, quantise: dict[str, int] | None) -> None:
    """Dense, rounded or of experts; more rows take longer."""
    config = {
        "model_type": family, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 128,
        "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    plant = LivePlant(
        file, random=True, dtype="float32", device="cpu", threads=1, seed=0, pace_share=0.1, quantise=quantise
    )
    assert plant.yardsticks == pace.SIZES
    assert all(plant.yardstick(rows) > 0 for rows in (1, 1, 64, 8))
    few, many = (np.median([plant.yardstick(rows) for _ in range(20)]) for rows in (1, 4096))
    assert many > 3 * few
    assert not plant.clock().readings


def test_a_yardstick_is_the_products_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first, warmed up by one of the last; none is left out, since they do not slow down alike."""
    made = decoder()
    seen: list[tuple[tuple[int, ...], object]] = []
    monkeypatch.setattr(pace, "linear", lambda x, matrix: seen.append((tuple(x.shape), matrix)))
    assert pace.Yardstick(made)(5) > 0
    first, last = made.weights.layers
    assert isinstance(first.ffn, DenseFFN)
    multiplied = [last.o, first.qkv, first.o, first.ffn.gate_up, first.ffn.down]
    assert [id(matrix) for _, matrix in seen] == [id(matrix) for matrix in multiplied]
    assert [shape for shape, _ in seen] == [(5, matrix.shape[1]) for matrix in multiplied]


def test_a_run_that_is_interrupted_by_readings_plays_the_same(passing: PassingTime) -> None:
    """Readings take longer than everything else together, and are in no step and in nobody's latency."""

    def slow(rows: int) -> float:
        passing.now += 0.3
        return 0.3

    asked = [Request(i, 0.01 * i, 12, 6) for i in range(4)]
    outputs = []
    for make_clock in (PacedClock, lambda: PacedClock(slow, share=0.98, sizes=[1])):
        generations = [materialise(request, 6, 50, 16, 16) for request in asked]
        played = play(engine(), generations, make_clock)
        outputs.append([each.output for each in generations])
        assert max(end - begin for _, begin, end in played.spans) < 0.3
        assert max(np.diff(times).max() for times in played.token_times) < 0.3
    assert outputs[0] == outputs[1]
    assert len(played.readings) > 1


def test_the_pace_is_not_read_while_the_engine_waits(passing: PassingTime) -> None:
    def yardstick(rows: int) -> float:
        passing.now += 1e-4
        return 1e-4

    asked = [Request(i, 0.3 * i, 12, 3) for i in range(3)]
    played = play(
        engine(),
        [materialise(request, 3, 50, 16, 16) for request in asked],
        lambda: PacedClock(yardstick, share=0.9, sizes=[1]),
    )
    ends = [end for _, _, end in played.spans]
    assert len(played.readings) > 3
    for when, _, _ in played.readings:
        assert min(abs(when - end) for end in ends) < 1e-4
