"""Steps of an AFD bundle: against the closed form, the simulated bundle, and the memory of its instances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from latency_models.deployment.hardware import Deployment, footprint, load_hardware
from latency_models.deployment.models import load_model
from latency_models.io.config_io import checked
from latency_models.sources.afd_bundle import AfdBundleSpec, BundleStepTime, expected_largest
from latency_models.sources.roofline.placement import RESERVED
from latency_models.stages import PassLatency
from schedulers.batches import Batch, Chunk
from schedulers.sequence import Sequence
from twin.afd.bundle import Bundle, BundleConfig, Supply, step_table
from twin.afd.point import steady_state
from twin.theory.cycle import CycleModel, load_phases
from workloads.errors import BadInput
from workloads.lengths import Geometric
from workloads.pairs import Independent
from workloads.request import Request

LINES = PassLatency(attention=(2e-8, 1e-4), ffn=(2e-6, 3e-4), communication=(1e-6, 1e-4))


def bundle(base: Path = Path(), **section: object) -> BundleStepTime:
    fields: dict[str, Any] = {"source": "afd_bundle", "model": "qwen3-235b-a22b", "hardware": "gb200", "weights": "fp8"}
    result = checked(AfdBundleSpec, {**fields, "ffn_gpus": 4, **section}, None).build(base)
    assert isinstance(result, BundleStepTime)
    return result


def calibrated(folder: Path, **section: object) -> BundleStepTime:
    """A bundle whose stages are `LINES`, of a whole step."""
    names = {"attention": LINES.attention, "ffn": LINES.ffn, "communication": LINES.communication}
    units = {"attention": "token", "ffn": "request", "communication": "token"}
    lines = {
        name: {"alpha": a, "beta": b, "alpha_unit": f"seconds/{units[name]}", "beta_unit": "seconds"}
        for name, (a, b) in names.items()
    }
    document = {
        "schema": "twin.calibration/1", "name": "made-up", "time_unit": "seconds", "scope": "step", **lines,
        "provenance": {"method": "published", "source": "a test", "device": "none", "model": "none"},
    }  # fmt: skip
    (folder / "lines.yaml").write_text(yaml.safe_dump(document))
    return bundle(folder, calibration="lines.yaml", **section)


@given(x=st.integers(1, 12), y=st.integers(1, 3), m=st.integers(1, 4), batch=st.integers(1, 64))
@settings(max_examples=settings().max_examples * 2 // 3)
def test_a_step_of_equal_contexts_is_the_closed_form(
    x: int, y: int, m: int, batch: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """m steps of the ring in the closed form, whose loads are at their mean, are one step of all sequences."""
    result = calibrated(
        tmp_path_factory.mktemp("lines"), attention_instances=x, ffn_instances=y, microbatches=m, ffn_gpus=1
    )
    pairs = Independent(Geometric(200), Geometric(50))
    theory = CycleModel(LINES, batch, m, load_phases(pairs, batch, in_step=False))
    (law,) = theory.phases
    decodes = x * m * batch
    (seconds,) = result.decode_seconds(decodes, round(law.mean * x * m), 1, 1)
    assert seconds == pytest.approx(m * theory.step_time_at_mean_load(x / y), rel=1e-3)


@pytest.mark.parametrize(("x", "batch"), [(2, 16), (8, 32)])
def test_the_wait_for_the_fullest_instance_is_that_of_the_simulated_bundle(x: int, batch: int, tmp_path: Path) -> None:
    """Attention sets the step, so that the barrier costs most; without it the step is 5 to 12 % too short."""
    pairs = Independent(Geometric(2000), Geometric(400))
    pmf = pairs.slot_load_pmf()
    loads = np.arange(len(pmf))
    mean = float(pmf @ loads)
    cv = float(np.sqrt(pmf @ (loads - mean) ** 2)) / mean
    result = calibrated(tmp_path, attention_instances=x, ffn_gpus=1, context_cv=cv)
    decodes = 2 * x * batch
    (seconds,) = result.decode_seconds(decodes, round(decodes * mean), 1, 1)

    rng = np.random.default_rng(5)
    config = BundleConfig(x, 1, batch, LINES, microbatches=2)
    supply = Supply(*pairs.sample(rng, decodes * 30), None, decodes * 28)
    records = Bundle(config, supply).run()
    state = steady_state(config, supply, records, step_table(records), slot_load=mean, warm_up=1600)
    simulated = decodes / (state.throughput * (x + 1))
    assert seconds == pytest.approx(simulated, rel=0.015)
    without = calibrated(tmp_path, attention_instances=x, ffn_gpus=1).decode_seconds(
        decodes, round(decodes * mean), 1, 1
    )
    assert without[0] < 0.96 * simulated


def test_the_largest_of_normal_numbers() -> None:
    draws = np.random.default_rng(0).standard_normal((200_000, 8)).max(axis=1).mean()
    assert expected_largest(1) == 0
    assert expected_largest(2) == pytest.approx(1 / np.sqrt(np.pi), rel=2e-3)
    assert expected_largest(8) == pytest.approx(draws, rel=5e-3)


def test_a_prompt_beside_decodes_passes_by_itself() -> None:
    result, sequence = bundle(attention_instances=4), Sequence(Request(0, 0.0, 1, 1), 0, one_shot=False)
    chunk = Chunk(sequence, 512, 0, True)
    decodes = [sequence] * 64
    separate = result.seconds(Batch([chunk]))
    together = result.seconds(Batch([chunk], decodes, 64 * 1000, 1000))
    assert together == pytest.approx(separate + result.decode_seconds(64, 64 * 1000, 1000, 1)[0])


def test_memory_is_that_of_the_attention_instances() -> None:
    model, hardware = load_model("qwen3-235b-a22b"), load_hardware("gb200")
    bytes_ = footprint(model, Deployment(ffn_cards=4, precision="fp8"))
    single = (0.9 * hardware.memory_capacity - bytes_.attention_weights - RESERVED) / bytes_.kv_bytes_per_token
    assert bundle(attention_instances=28).kv_tokens(0.9, 1) == pytest.approx(28 * single)
    # The measured bundles hold about 839,400 tokens a GPU, of a share of the memory that is not stated.
    assert single == pytest.approx(839_400, rel=0.06)


def test_errors_name_the_field() -> None:
    with pytest.raises(BadInput, match=r"ffn_gpus.*leave room for FFN weights: 56.\d* GB"):
        bundle(model="llama-3.1-70b", hardware="l40s", ffn_gpus=1).kv_tokens(0.9, 1)
    with pytest.raises(BadInput, match=r"max_model_len.*leave room for a KV cache of 9,000,000"):
        bundle(max_model_len=9_000_000)
    with pytest.raises(BadInput, match=r"calibration.*in seconds.*is in cycles"):
        bundle(calibration="deepseek-v3-ascend-910c")
    with pytest.raises(BadInput, match=r"model.*sliding windows"):
        bundle(model="gpt-oss-120b", weights="bf16")
    with pytest.raises(BadInput, match=r"weights.*expected bf16 on a100"):
        bundle(hardware="a100-sxm-80gb")


def test_unknowns_are_wider_where_nothing_was_measured() -> None:
    def widths(result: BundleStepTime) -> dict[str, float]:
        return {item.name: item.deviation or 0.0 for item in result.unknowns()}

    same_device, other_device = widths(bundle()), widths(bundle(hardware="h200-sxm"))
    assert same_device.keys() < other_device.keys()
    assert same_device["bundle_step"] < other_device["bundle_step"]


def test_a_step_has_the_output_head_of_every_microbatch_and_the_host_of_one() -> None:
    """Where attention sets the step, the head adds a read of its weights for each microbatch, and the host nothing."""
    result = bundle(attention_instances=2)
    model, hardware, stages = result.model, result.hardware, result.stages
    decodes, kv = 512, 512 * 200_000
    (seconds,) = result.decode_seconds(decodes, kv, 200_000, 1)
    fixed, token, _ = stages.attention(decodes / 4)
    attention = model.layers * (2 * fixed + token * kv / 2)
    assert seconds == pytest.approx(attention + 2 * stages.head(decodes / 4), rel=1e-9)
    content = 2 * model.vocabulary * model.hidden_size / hardware.memory_bandwidth
    assert stages.head(1) == pytest.approx(content)

    (single,) = result.decode_seconds(1, 1, 1, 1)
    fixed, token, _ = stages.attention(0.5)
    layers = model.layers * (fixed + token * 2 / 2 + stages.ffn(1) + stages.exchange(0.5))
    assert single == pytest.approx(layers + stages.head(0.5) + stages.host(0.5), rel=1e-6)


def test_reading_caches_hides_sequences_beyond_the_fitted_ones() -> None:
    """The same tokens in four times as many sequences take longer by their rows, not by a fixed time for each."""
    result = bundle(attention_instances=2)
    stages = result.stages
    smaller, larger = (stages.attention(count) for count in (25, 100))
    rows = [stages.attention(count)[2] - 2.6e-7 * count for count in (25, 100)]
    assert smaller[0] - rows[0] == pytest.approx(larger[0] - rows[1]) == pytest.approx(25 * 2.6e-7)
    (short,) = result.decode_seconds(8000, 8000, 1, 1)  # two microbatches on each of two attention instances
    assert short >= result.model.layers * 2 * stages.attention(2000)[2]
