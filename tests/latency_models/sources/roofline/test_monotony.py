"""Steps with the built-in efficiencies never take longer in a less precise format, on a newer chip or with more memory
bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.kernel_fits import SUCCESSORS
from latency_models.deployment.hardware import Hardware, load_hardware
from latency_models.deployment.models import ExpertFFN, LatentAttention, Model, Weights, load_model
from latency_models.io.files import builtin_names
from latency_models.sources.roofline.efficiency import built_in_efficiency
from latency_models.sources.roofline.placement import COMPUTED_IN, Placement
from latency_models.sources.roofline.spec import RooflineStepTime
from schedulers.batches import Batch
from tests.latency_models.sources.kernel_tables.small_tables import batch

MODELS = ["llama-3.1-8b", "llama-3.3-70b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3"]
FORMATS: list[list[Weights]] = [["bf16", "fp8", "fp4"], ["bf16", "int8"], ["bf16", "mxfp4"]]
BATCHES: list[Batch] = [
    *(batch(lengths=[length] * decodes) for decodes in (1, 16, 200) for length in (10, 4000)),
    *(batch([(tokens, context)]) for tokens in (7, 500, 8000) for context in (0, 3000)),
    batch([(2000, 0), (64, 500)], lengths=[900] * 60),
]


def times(model: Model, hardware: Hardware, placement: Placement) -> list[float]:
    step_time = RooflineStepTime(model, hardware, placement, built_in_efficiency())
    return [step_time.seconds(item) for item in BATCHES]


def placements(model: Model, hardware: Hardware) -> Iterator[Placement]:
    """Splits of a model, in each format that the device computes in."""
    sparse = isinstance(model.ffn, ExpertFFN)
    splits = [Placement(width) for width in (1, 2, 8)] + [Placement(1, 1, 8, True), Placement(2, 1, 4)] * sparse
    for formats in FORMATS:
        for weights in formats:
            if COMPUTED_IN[weights] in hardware.peak_flops and (sparse or weights != "mxfp4"):
                linear: Weights = "bf16" if weights == "mxfp4" else weights
                yield from (replace(split, weights=linear, experts=weights) for split in splits)


def no_slower(fast: list[float], slow: list[float]) -> bool:
    return all(quick <= long * (1 + 1e-12) for quick, long in zip(fast, slow, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("hardware", builtin_names("hardware"))
def test_a_less_precise_format_is_never_slower(name: str, hardware: str) -> None:
    model, device = load_model(name), load_hardware(hardware)
    for placement in placements(model, device):
        before = next(row[row.index(placement.experts) - 1] for row in FORMATS if placement.experts in row)
        if placement.experts != "bf16" and COMPUTED_IN[before] in device.peak_flops:
            precise = replace(placement, weights=before, experts=before)
            assert no_slower(times(model, device, placement), times(model, device, precise)), placement
        if not isinstance(model.attention, LatentAttention):
            small = replace(placement, cache="fp8")
            assert no_slower(times(model, device, small), times(model, device, placement)), small


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("older", "newer"), [pair for row in SUCCESSORS for pair in pairwise(row)])
def test_a_newer_chip_is_never_slower(name: str, older: str, newer: str) -> None:
    model, old, new = load_model(name), load_hardware(older), load_hardware(newer)
    for placement in placements(model, old):
        assert no_slower(times(model, new, placement), times(model, old, placement)), placement


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("hardware", builtin_names("hardware"))
def test_more_bandwidth_is_never_slower(name: str, hardware: str) -> None:
    model, device = load_model(name), load_hardware(hardware)
    faster = device.model_copy(update={"memory_bandwidth": 1.3 * device.memory_bandwidth})
    for placement in placements(model, device):
        assert no_slower(times(model, faster, placement), times(model, device, placement)), placement
