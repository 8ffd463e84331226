"""The yardstick, and the clock that stands still while it is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.shapes import Shape
from live.engine import Engine
from live.models.config import ModelConfig
from live.models.decoder import Decoder
from live.models.weights import random_weights
from live.validation import pace
from live.validation.pace import PacedClock, Yardstick
from live.validation.plant import LivePlant
from live.validation.play import play
from live.validation.prompts import materialise
from schedulers.engine_config import EngineConfig
from workloads.request import Request

CONFIG = ModelConfig("llama", Shape(2, 32, 48, 4, 2, 8, 50), positions=128, tied=False)


def engine(*, headless: bool = False) -> Engine:
    torch.set_num_threads(1)
    weights = random_weights(CONFIG, torch.float32, "cpu")
    if headless:
        weights = replace(weights, head=None)
    return Engine(Decoder(CONFIG, weights), EngineConfig(kv_blocks=16, max_num_seqs=2))


class Time:
    """A clock that goes by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_the_clock_stands_still_while_the_pace_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr(pace, "time", time)

    def yardstick(rows: int) -> float:
        time.now += 0.25
        return 0.2

    clock = PacedClock(yardstick, share=0.1, sizes=[4])
    clock.rest()
    assert clock() == 0.0
    assert clock.readings == [(0.0, 4, 0.2)]
    time.now += 2.0
    clock.rest()  # a tenth of the time: not before 2.5 s have gone by, of which the clock stood still for 0.25
    assert clock() == 2.0
    time.now += 0.25
    clock.rest()
    assert clock() == 2.25
    assert clock.readings == [(0.0, 4, 0.2), (2.25, 4, 0.2)]
    plain = PacedClock()
    time.now += 9.0
    plain.rest()
    assert (plain(), plain.readings) == (9.0, [])


def test_every_size_is_given_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr(pace, "time", time)

    def yardstick(rows: int) -> float:
        time.now += 0.01 * rows
        return 0.01 * rows

    clock = PacedClock(yardstick, share=0.5, sizes=[1, 8])
    for _ in range(1000):
        clock.rest()
        time.now += 0.01
    read = [rows for _, rows, _ in clock.readings]
    assert read[:3] == [1, 8, 1]
    assert read.count(1) == pytest.approx(8 * read.count(8), abs=8)
    given = sum(seconds for _, _, seconds in clock.readings)
    assert given == pytest.approx(0.5 * (time.now - 100.0), rel=0.05)


@pytest.mark.parametrize("headless", [False, True])
def test_the_yardstick_leaves_nothing_behind(headless: bool) -> None:
    made = engine(headless=headless)
    yardstick = Yardstick(made)
    assert all(yardstick(rows) > 0 for rows in (1, 1, 64, 8))
    assert not made.core.sequences
    assert made.core.kv.free == made.core.kv.blocks


def test_every_row_is_computed_at_every_reading(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 128,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    plant = LivePlant(file, random=True, dtype="float32", device="cpu", threads=1, seed=0, pace_share=0.1)
    yardstick = plant.yardstick
    core = yardstick._engine.core
    before = core.prefill_tokens
    for rows in (64, 64, 1, 64):
        yardstick(rows)
    assert core.prefill_tokens - before == 3 * 64 + 1


def test_a_run_that_is_interrupted_by_readings_plays_the_same() -> None:
    """Readings take longer than everything else together, and are in no step and in nobody's latency."""
    yardstick = Yardstick(engine())

    def slow(rows: int) -> float:
        begin = pace.time.perf_counter()
        while pace.time.perf_counter() - begin < 0.3:
            yardstick(rows)
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


def test_the_pace_is_not_read_while_the_engine_waits() -> None:
    yardstick = Yardstick(engine())
    asked = [Request(i, 0.3 * i, 12, 3) for i in range(3)]
    played = play(
        engine(),
        [materialise(request, 3, 50, 16, 16) for request in asked],
        lambda: PacedClock(yardstick, share=0.9, sizes=[1]),
    )
    ends = [end for _, _, end in played.spans]
    assert len(played.readings) > 3
    for when, _, _ in played.readings:
        assert min(abs(when - end) for end in ends) < 0.05
