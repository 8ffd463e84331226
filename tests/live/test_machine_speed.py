"""Speed probes, and the clock that pauses while they are timed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.shapes import Shape
from live import clock as clock_module
from live.clock import WallClock
from live.engine import Engine
from live.models.config import ModelConfig
from live.models.decoder import Decoder
from live.models.weights import DenseFFN, random_weights
from live.validation import machine_speed
from live.validation.backend import LiveBackend
from live.validation.machine_speed import SpeedReadings
from live.validation.prompts import materialise
from live.validation.replay import replay
from schedulers.engine_config import EngineConfig
from workloads.request import Request

CONFIG = ModelConfig("llama", Shape(2, 32, 48, 4, 2, 8, 50), max_position_embeddings=128, tied=False)


def decoder() -> Decoder:
    torch.set_num_threads(1)
    return Decoder(CONFIG, random_weights(CONFIG, torch.float32, "cpu"))


def engine() -> Engine:
    return Engine(decoder(), EngineConfig(num_gpu_blocks=16, max_num_seqs=2))


class Time:
    """Time that passes by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class PassingTime(Time):
    """Time that passes by 10 µs with each look at it, and by the duration of each sleep."""

    def perf_counter(self) -> float:
        self.now += 1e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> PassingTime:
    """The time of a replay, free of this machine's pauses."""
    time = PassingTime()
    for module in (clock_module, machine_speed):
        monkeypatch.setattr(module, "time", time)
    return time


def test_the_clock_pauses_during_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr(clock_module, "time", time)
    monkeypatch.setattr(machine_speed, "time", time)

    def probe(rows: int) -> float:
        time.now += 0.25
        return 0.2

    clock = WallClock()
    speed = SpeedReadings(clock, probe, share=0.125, sizes=[4])
    speed.after_step(3)
    assert clock() == 0.0
    assert speed.readings == [(0.0, 4, 0.2)]
    time.now += 1.5
    # An eighth of the time: not before 2 s have passed, during 0.25 s of which the clock was paused.
    speed.after_step(3)
    assert clock() == 1.5
    time.now += 0.25
    speed.after_step(3)
    assert clock() == 1.75
    assert speed.readings == [(0.0, 4, 0.2), (1.75, 4, 0.2)]


def test_readings_follow_the_sizes_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every probe once, then the nearest: an eighth of the time of each, or one a step where that is less."""
    time = Time()
    monkeypatch.setattr(clock_module, "time", time)
    monkeypatch.setattr(machine_speed, "time", time)

    def probe(rows: int) -> float:
        time.now += rows / 1024
        return rows / 1024

    speed = SpeedReadings(WallClock(), probe, share=0.125, sizes=[1, 8, 64])

    def steps(rows: int, seconds: float) -> list[int]:
        before, begin = len(speed.readings), time.now
        while time.now < begin + seconds:
            time.now += 1 / 64
            speed.after_step(rows)
        return [size for _, size, _ in speed.readings[before:]]

    assert steps(1, 0.1)[:3] == [1, 8, 64]
    assert steps(1, 17.0) == [1] * 1024  # a step takes 1/64 s and its reading 1/1024 s
    large = steps(40, 20.0)
    assert set(large) == {64}
    assert len(large) / 16 == pytest.approx(0.125 * 20.0, rel=0.05)
    assert steps(1, 0.16) == [1] * 10  # at once, although a large probe was read shortly before
    time.now += 1000.0
    assert steps(1, 0.16) == [1] * 10  # a wait earns no further readings


@pytest.mark.parametrize(("family", "quantise"), [("qwen3", None), ("qwen3", {"group": -1}), ("qwen3_moe", None)])
def test_every_model_has_speed_probes(tmp_path: Path, family: str, quantise: dict[str, int] | None) -> None:
    """Dense, quantised or with experts."""
    config = {
        "model_type": family, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 128,
        "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    backend = LiveBackend(
        file, random=True, dtype="float32", device="cpu", threads=1, seed=0, machine_speed_share=0.1, quantise=quantise
    )
    assert backend.speed_probe_rows == machine_speed.PROBE_ROWS
    probe = machine_speed.MachineSpeedReader(backend.decoder, 0.1).probe
    assert all(probe(rows) > 0 for rows in (1, 1, 64, 8))


def test_a_speed_probe_is_the_products_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products of the first layer, after one of the last layer as a warm-up."""
    model = decoder()
    seen: list[tuple[tuple[int, ...], object]] = []
    monkeypatch.setattr(machine_speed, "linear", lambda x, matrix: seen.append((tuple(x.shape), matrix)))
    assert machine_speed.SpeedProbe(model)(5) > 0
    first, last = model.weights.layers
    assert isinstance(first.ffn, DenseFFN)
    multiplied = [last.o, first.qkv, first.o, first.ffn.gate_up, first.ffn.down]
    assert [id(matrix) for _, matrix in seen] == [id(matrix) for matrix in multiplied]
    assert [shape for shape, _ in seen] == [(5, matrix.shape[1]) for matrix in multiplied]


def test_readings_do_not_change_a_replay(passing: PassingTime) -> None:
    """Readings take longer than everything else together, and are in no step and in no latency."""

    def slow(rows: int) -> float:
        passing.now += 0.3
        return 0.3

    requests = [Request(i, 0.01 * i, 12, 6) for i in range(4)]
    outputs = []
    for read in (False, True):
        clock = WallClock()
        speed = SpeedReadings(clock, slow, share=0.98, sizes=[1]) if read else None
        generations = [materialise(request, 6, 50, 16) for request in requests]
        replayed = replay(engine(), generations, clock, speed)
        outputs.append([each.output for each in generations])
        assert max(end - begin for _, begin, end in replayed.spans) < 0.3
        assert max(np.diff(times).max() for times in replayed.token_times) < 0.3
    assert outputs[0] == outputs[1]
    assert len(replayed.readings) > 1


def test_no_reading_is_taken_while_the_engine_waits(passing: PassingTime) -> None:
    def probe(rows: int) -> float:
        passing.now += 1e-4
        return 1e-4

    requests = [Request(i, 0.3 * i, 12, 3) for i in range(3)]
    clock = WallClock()
    speed = SpeedReadings(clock, probe, share=0.9, sizes=[1])
    replayed = replay(engine(), [materialise(request, 3, 50, 16) for request in requests], clock, speed)
    ends = [end for _, _, end in replayed.spans]
    assert len(replayed.readings) > 3
    for when, _, _ in replayed.readings:
        assert min(abs(when - end) for end in ends) < 1e-4
