"""The published tables of an RTX PRO 6000: what was measured comes back, and errors are as stated."""

from __future__ import annotations

from pathlib import Path

import pytest

from latency_models.deployment.models import load_model
from latency_models.io.config_io import read_yaml_text, write_yaml
from latency_models.sources.kernel_tables.attention import AttentionTimes
from latency_models.sources.kernel_tables.settings import KernelTableSettings
from latency_models.sources.kernel_tables.spec import KernelTableStepTime, load_kernel_tables
from latency_models.sources.kernel_tables.tables import KernelTables
from tests.latency_models.sources.kernel_tables.small_tables import batch

SETTINGS = KernelTableSettings(model="llama-3.1-8b", overhead=160e-6, kernel_gap=1.3e-6)


@pytest.fixture(scope="module")
def model(real_tables: KernelTables) -> KernelTableStepTime:
    return KernelTableStepTime(real_tables, SETTINGS, load_model(SETTINGS.model))


def test_every_measured_point_comes_back(real_tables: KernelTables) -> None:
    """One prompt or none, even decodes: nothing to interpolate."""
    flagged: list[str] = []
    attention = AttentionTimes(real_tables.attention, None, 1.0, lambda axis, value: flagged.append(axis))
    decode, prefill, mixed = real_tables.attention.regimes
    for (count, history), measured in decode.items():
        count, length = int(count), int(history) + 1
        assert attention.decode(count, count * length, length) == pytest.approx(measured)
    for (chunk, context), measured in prefill.items():
        assert attention.mixed(batch([(int(chunk), int(context))])) == pytest.approx(measured)
    for (chunk, context, count, history), measured in list(mixed.items())[::17]:
        some = batch([(int(chunk), int(context))], [int(history) + 1] * int(count))
        assert attention.mixed(some) == pytest.approx(measured)
    assert not flagged


def test_chunks_together_cost_no_less_than_the_dearest(real_tables: KernelTables) -> None:
    """A few tokens on a long context keep a few cores busy for long; a fresh prompt beside them changes nothing."""
    attention = AttentionTimes(real_tables.attention, None, 1.0, lambda axis, value: None)
    separate, fresh = attention.mixed(batch([(16, 8192)])), attention.mixed(batch([(1000, 0)]))
    assert fresh < separate == attention.mixed(batch([(16, 8192), (1000, 0)]))


def test_where_they_come_from_and_how_far_interpolation_is_off(real_tables: KernelTables) -> None:
    assert real_tables.provenance.device == "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    assert real_tables.ranges["attention.kv_decode"] == (0.0, 16384.0)
    held_out = real_tables.held_out
    assert set(held_out) == {
        "dense.tokens", "per_sequence.sequences", "attention.decode.n_decode", "attention.decode.kv_decode",
        "attention.prefill.prefill_chunk", "attention.prefill.kv_prefill", "attention.mixed.prefill_chunk",
        "attention.mixed.kv_prefill", "attention.mixed.n_decode", "attention.mixed.kv_decode",
    }  # fmt: skip
    assert all(error.median < 0.02 for error in held_out.values())
    assert all(error.p90 < 0.2 for error in held_out.values())
    skew = real_tables.skew
    # Halfway to the neighbours' α, 3.1 %; 2.7 % without, and 3.9 in place of 3.7 % between the measured sizes.
    assert (skew.heldout_median_error or 0.0) < 0.035 < 0.045 < (skew.uncorrected_median_error or 0.0)
    assert (skew.heldout_p90_error or 0.0) < 0.13 < 0.2 < (skew.uncorrected_p90_error or 0.0)


def test_the_file_holds_all_of_it(real_tables: KernelTables) -> None:
    text = write_yaml(real_tables.document())
    assert len(text) < 600_000
    assert KernelTables.from_document(read_yaml_text(text)) == real_tables


def test_steps_of_a_loaded_server(real_folder: Path) -> None:
    """The times of vLLM 0.19 on this GPU: 128 decodes of 1,142 tokens 27.3 ms, a single one 12 to 13."""
    model = load_kernel_tables(real_folder, SETTINGS)
    assert model.decode_seconds(128, 128 * 1142, 3922, 1)[0] == pytest.approx(27.3e-3, rel=0.05)
    assert model.seconds(batch(lengths=[2400])) == pytest.approx(12.6e-3, rel=0.05)
    assert model.outside() == {}


def test_more_work_never_takes_less_time_by_much(model: KernelTableStepTime) -> None:
    """Kernels change with size, and some measured points fall; a tenth is more than any such dip."""
    before = 0.0
    for tokens in range(16, 2048, 16):
        now = model.seconds(batch([(tokens, 0)], [1000] * 64))
        assert now > 0.9 * before
        before = now
