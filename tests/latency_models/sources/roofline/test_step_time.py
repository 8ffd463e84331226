"""Roofline step times: sums by hand, equal runs, sizes that scale as they should, and what is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.models import load_model
from latency_models.io.config_io import checked
from latency_models.sources.roofline.efficiency import Efficiency, built_in_efficiency
from latency_models.sources.roofline.placement import RESERVED, Placement, device_memory
from latency_models.sources.roofline.spec import STEP_SHARE, RooflineSpec, RooflineStepTime, board_cell
from latency_models.sources.roofline.step_kernels import attended_pairs
from latency_models.sources.roofline.work import ABOUT, WHOLE_STEP
from latency_models.wrapped import PartitionedStepTime
from schedulers.parallel_cores import GroupBatch
from tests.latency_models.sources.kernel_tables.small_tables import batch
from workloads.errors import BadInput

ALL_KINDS = built_in_efficiency().kernels.keys()


def perfect(**engine: float) -> Efficiency:
    """Kernels that reach every peak, launched in no time, and an engine that adds `engine`."""
    reached = {"launch": 0.0, "compute": 1.0, "memory": 1.0, "spread": 0.1, "error": 0.0, "kernels": 1}
    time = {"layer": 0.0, "per_sequence": 0.0, "prompt_layer": 0.0, "spread": 0.2, "error": 0.0, "rows": 1} | engine
    document = {
        "schema": "twin.kernel-efficiency/1",
        "sources": [],
        "kernels": {kind: {"any": reached, "devices": {}} for kind in ALL_KINDS},
        "engine": time,
    }
    return checked(Efficiency, document, None)


def model_of(name: str = "llama-3.1-8b", hardware: str = "h100-sxm", **placement: Any) -> RooflineStepTime:
    return RooflineStepTime(load_model(name), load_hardware(hardware), Placement(**placement), perfect())


def built(**section: Any) -> RooflineStepTime:
    fields = {"source": "roofline", "model": "llama-3.1-8b", "hardware": "h100-sxm"} | section
    step_time = checked(RooflineSpec, fields, None).build(Path())
    assert isinstance(step_time, RooflineStepTime)
    return step_time


def test_a_single_decode_reads_the_weights_and_its_cache_once() -> None:
    """With perfect kernels: all weights but the embedding's, activations, and 1,000 cached tokens, at 3.35 TB/s."""
    model, bandwidth = load_model("llama-3.1-8b"), 3.35e12
    weights = 2 * (model.parameters - model.vocabulary * model.hidden_size - 65 * model.hidden_size)
    cached = 1000 * 2 * 8 * 128 * 2 * 32
    (seconds,) = model_of().decode_seconds(1, 1000, 1000, 1)
    assert seconds == pytest.approx((weights + cached) / bandwidth, rel=2e-3)  # the rest are activations
    assert seconds > (weights + cached) / bandwidth


def test_a_long_prompt_computes_at_the_peak() -> None:
    """8,192 rows: 2 FLOPs a weight and row, 4·heads·dim for each pair in attention; the head for one row."""
    model, peak, rows = load_model("llama-3.1-8b"), 9.894e14, 8192
    linear = 2 * rows * (model.parameters - 2 * model.vocabulary * model.hidden_size - 65 * model.hidden_size)
    attention = 32 * 4 * 32 * 128 * rows * (rows + 1) / 2
    seconds = model_of().seconds(batch([(rows, 0)]))
    assert seconds == pytest.approx((linear + attention) / peak, rel=0.12)  # norms and the head read memory
    assert seconds > (linear + attention) / peak


def test_chunks_of_a_prompt_attend_to_as_many_pairs_as_the_whole() -> None:
    assert attended_pairs(1000, 0, 0) == attended_pairs(300, 0, 0) + attended_pairs(700, 300, 0)
    assert attended_pairs(1000, 0, 128) == attended_pairs(300, 0, 128) + attended_pairs(700, 300, 128)
    assert attended_pairs(1000, 0, 128) == sum(min(i, 128) for i in range(1, 1001))


def test_decodes_of_latent_attention_read_the_compressed_cache_once() -> None:
    """By hand, of DeepSeek-V3: 61 layers of (512 + 64) elements of two bytes a token, at 4.8 TB/s.

    128 heads multiply each of them by 2 · (512 + 64 + 512) FLOPs, which takes 1.2 times as long at the peak: on 8
    devices with 16 heads each it is the bytes that count.
    """
    short, long = (
        model_of("deepseek-v3", "h200-sxm", tensor_parallel=8).decode_seconds(16, 16 * kv, kv, 1)[0]
        for kv in (1000, 5000)
    )
    assert long - short == pytest.approx(16 * 4000 * 61 * (512 + 64) * 2 / 4.8e12)
    single = model_of("deepseek-v3", "h200-sxm")
    computed = 16 * 4000 * 61 * 2 * 128 * (512 + 64 + 512) / 9.894e14
    assert single.decode_seconds(16, 16 * 5000, 5000, 1)[0] - single.decode_seconds(16, 16 * 1000, 1000, 1)[
        0
    ] == pytest.approx(computed)


def test_sparse_attention_reads_at_most_top_k_tokens_and_every_key_of_an_index() -> None:
    """By hand, of GLM-5: beyond 2,048 tokens only the keys of 78 indexers, of 132 bytes; below, the cache as well."""
    step_time = model_of("glm-5", "h200-sxm", tensor_parallel=8)
    seconds = {kv: step_time.decode_seconds(8, 8 * kv, kv, 1)[0] for kv in (1048, 2048, 10_048)}
    assert seconds[10_048] - seconds[2048] == pytest.approx(8 * 8000 * 78 * 132 / 4.8e12)
    assert seconds[2048] - seconds[1048] == pytest.approx(8 * 1000 * 78 * (132 + 576 * 2) / 4.8e12)
    chunk, behind = (step_time.seconds(batch([(4096, context)])) for context in (0, 100_000))
    pairs = 4096 * 2048 - attended_pairs(4096, 0, 2048)
    attention = 78 * pairs * 2 * 8 * (192 + 64 + 256) / 9.894e14
    scores = 78 * 4096 * 100_000 * 2 * 32 * 128 / 1.9789e15
    assert behind - chunk == pytest.approx(attention + scores)


def test_linear_attention_reads_and_writes_a_state_whatever_the_context() -> None:
    """By hand, of Qwen3.5-397B: 45 layers with a state of 64 matrices of 128 by 128 in FP32, and convolutions."""
    step_time = model_of("qwen3.5-397b-a17b", "h200-sxm", tensor_parallel=2)
    short, long = (step_time.decode_seconds(8, 8 * kv, kv, 1)[0] for kv in (1000, 5000))
    assert long - short == pytest.approx(8 * 4000 * 15 * 2 * 1 * 256 * 2 / 4.8e12)  # one KV head a device
    linear = step_time.model.linear_attention
    halved = step_time.model.model_copy(update={"linear_attention": linear.model_copy(update={"state_bytes": 2.0})})
    half = RooflineStepTime(halved, step_time.hardware, step_time.placement, perfect())
    state = 45 * 64 * 128 * 128 / 2  # elements on each of two devices, read and written
    saved = step_time.decode_seconds(8, 8, 1, 1)[0] - half.decode_seconds(8, 8, 1, 1)[0]
    assert saved == pytest.approx(8 * state * 2 * 2.0 / 4.8e12)


def test_states_have_slots_beside_the_blocks() -> None:
    model, hardware = load_model("qwen3.5-397b-a17b"), load_hardware("b300-sxm")
    small, large = (device_memory(model, hardware, Placement(8), 0.9, slots) for slots in (16, 256))
    assert small.free - large.free == 240 * model.state_bytes_per_sequence / 8
    assert large.state_bytes == 256 * model.state_bytes_per_sequence / 8
    assert small.kv_bytes_per_token == large.kv_bytes_per_token == 15 * 2 * 256 * 2  # KV heads: one a device
    stages = device_memory(model, hardware, Placement(4, 2), 0.9, 256)
    assert stages.state_bytes == pytest.approx(large.state_bytes)


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "glm-5", "kimi-k2", "qwen3.5-397b-a17b", "kimi-linear-48b-a3b", "nemotron-3-nano-30b-a3b"]
)
def test_one_device_holds_every_weight(name: str) -> None:
    """All weights once; routers' biases are left out."""
    model = load_model(name)
    memory = device_memory(model, load_hardware("b300-sxm"), Placement())
    assert memory.weights == pytest.approx(2 * model.parameters, rel=1e-5)


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-20b", "qwen3-30b-a3b", "glm-5", "qwen3.5-397b-a17b"]
)
def test_runs_of_decode_steps_are_equal_to_single_steps(name: str) -> None:
    step_time = RooflineStepTime(
        load_model(name), load_hardware("h200-sxm"), Placement(experts="bf16"), built_in_efficiency()
    )
    lengths = [100, 700, 3000]
    run = step_time.decode_seconds(3, sum(lengths), 3000, 50)
    assert run == [step_time.seconds(batch(lengths=[length + i for length in lengths])) for i in range(50)]


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5", "qwen3-30b-a3b"])
@pytest.mark.parametrize("score", [-40.0, 0.0, 2.0])
def test_runs_of_ranks_are_equal_to_single_steps_and_no_faster_than_the_peaks(name: str, score: float) -> None:
    estimate = model_of(name, data_parallel=4, expert_parallel=True)
    drawn = estimate.vary(dict.fromkeys((unknown.name for unknown in estimate.unknowns()), score))
    peaks = estimate.vary(dict.fromkeys((unknown.name for unknown in estimate.unknowns()), -1000.0))
    ranks = [[40_000], [100, 39_850], [9_000] * 4, []]  # the first is the slowest at first, the third at the end
    runs = [(len(lengths), sum(lengths), max(lengths, default=0)) for lengths in ranks]
    for step_time in (estimate, drawn, peaks):
        run = step_time.group_decode_seconds(runs, 3000)
        for i in (0, 1, 1500, 2999):
            step = [batch(lengths=[length + i for length in lengths]) if lengths else None for lengths in ranks]
            assert run[i] == step_time.group_seconds(GroupBatch(step, 1))
    least = peaks.group_decode_seconds(runs, 3000)
    assert all(seconds >= low for seconds, low in zip(drawn.group_decode_seconds(runs, 3000), least, strict=True))
    assert (drawn.group_decode_seconds(runs, 3) == least[:3]) == (score < 0)


def test_ranks_that_share_experts_step_as_their_slowest() -> None:
    step_time = model_of("qwen3-30b-a3b", data_parallel=2, expert_parallel=True)
    group = GroupBatch([batch(lengths=[10, 10]), None], 1)
    assert step_time.group_decode_seconds([(2, 20, 10), (0, 0, 0)], 2)[0] == step_time.group_seconds(group)
    # An idle rank computes its experts for the rows of the others.
    assert step_time.rank_seconds(None, 2) > 0
    # One batch stands for all replicas: each has as large a one.
    assert step_time.seconds(group.ranks[0]) == step_time.rank_seconds(group.ranks[0], 4)
    part = PartitionedStepTime(step_time, 2)
    assert part.group_seconds(group) == 2 * step_time.group_seconds(group), "on half of each device, too"


@pytest.mark.parametrize(
    ("devices", "rows", "measured"),
    [(8, 128, 102.9e-6), (8, 4096, 1473e-6), (16, 32, 99.9e-6), (16, 8192, 5537e-6), (32, 128, 324.4e-6)],
)
def test_rows_go_to_their_experts_in_the_time_that_deepep_takes(devices: int, rows: int, measured: float) -> None:
    """Dispatch and combine of so many rows of a device, as aiconfigurator measured them on one, two and four nodes."""
    model, hardware = load_model("deepseek-v3"), load_hardware("h200-sxm")
    placement = Placement(1, 1, devices, expert_parallel=True, weights="fp8", experts="fp8")
    kinds = built_in_efficiency().kernels.items()
    exchange = perfect().model_copy(
        update={"kernels": dict(perfect().kernels) | {k: v for k, v in kinds if "all" in k}}
    )
    batch_of_rank = batch([(rows, 0)])
    both, free = (
        RooflineStepTime(model, hardware, placement, efficiency, scales=scales).rank_seconds(
            batch_of_rank, rows * devices
        )
        for efficiency, scales in ((exchange, None), (exchange, {"all_reduce_kernels": 0.0}))
    )
    assert (both - free) / model.expert_layers == pytest.approx(measured, rel=0.25)


def test_attention_replicas_of_several_devices_reduce_within_their_node() -> None:
    whole, part = (model_of("deepseek-v3", "h200-sxm", tensor_parallel=2, data_parallel=n) for n in (4, 8))
    prompt = batch([(4096, 0)])
    rows = [model.rank_seconds(prompt, 0) for model in (whole, part)]
    assert rows[0] == rows[1]


def test_a_batch_of_tokens_reaches_few_experts_and_then_all() -> None:
    """Decodes of a mixture of experts slow down until every expert's weights are read, and little beyond."""
    step_time = model_of("qwen3-30b-a3b")
    times = [step_time.decode_seconds(n, n, 1, 1)[0] for n in (1, 16, 256, 512)]
    assert times[1] / times[0] > 4
    assert times[3] / times[2] < 1.2


def test_windows_bound_the_attention_of_long_contexts() -> None:
    short, long = (model_of("gpt-oss-20b").decode_seconds(8, 8 * kv, kv, 1)[0] for kv in (100, 100_000))
    layer = 99_900 * 8 * 2 * 8 * 64 * 2 / 3.35e12
    assert long - short == pytest.approx(12 * layer + 12 * layer * 28 / 99_900)


def test_devices_share_weights_and_pay_for_all_reduces() -> None:
    single, four = model_of(), model_of(tensor_parallel=4)
    separate, shared = (model.decode_seconds(1, 1, 1, 1)[0] for model in (single, four))
    assert separate / 4 < shared < separate / 3.9
    slow = model_of(hardware="l40s", tensor_parallel=4)
    chunk = batch([(4096, 0)])
    message = 2 * 32 * 1.5 * 4096 * 4096 * 2 / 3.2e10
    assert slow.seconds(chunk) > message


def test_draws_scale_each_part_and_the_whole_step() -> None:
    step_time = built()
    assert step_time.can_draw
    expected = {unknown.name: unknown for unknown in step_time.unknowns()}
    assert expected.keys() == {*ABOUT, WHOLE_STEP} - {
        "experts_kernels", "all_reduce_kernels", "prompt_index_kernels", "decode_index_kernels",
        "prompt_state_kernels", "decode_state_kernels",
    }  # fmt: skip  # a dense model on one device, with full attention
    (estimate,) = step_time.decode_seconds(4, 400, 100, 1)
    (slow,) = step_time.vary({WHOLE_STEP: 1.0}).decode_seconds(4, 400, 100, 1)
    assert slow == pytest.approx(estimate * expected[WHOLE_STEP].factor(1.0))
    assert step_time.vary({}).decode_seconds(4, 400, 100, 1) == [estimate]
    draws = [step_time.draw(np.random.default_rng(seed)).decode_seconds(4, 400, 100, 1)[0] for seed in range(400)]
    # Linear layers are most of the step, so that their factor and that of the whole nearly add up.
    deviations = [expected[name].deviation or 0.0 for name in (WHOLE_STEP, "linear_kernels")]
    assert np.std(np.log(draws)) == pytest.approx(np.hypot(*deviations), rel=0.25)
    assert np.mean(np.log(draws)) == pytest.approx(np.log(estimate), abs=0.05)


def test_no_draw_is_faster_than_the_weights_are_read() -> None:
    """Llama-3.3-70B in FP8 on one H200, whose weights take 14.7 ms; draws are not far above."""
    step_time = built(model="llama-3.3-70b", hardware="h200-sxm", weights="fp8")
    memory = device_memory(load_model("llama-3.3-70b"), step_time.hardware, step_time.placement)
    embedding = 2.0 * step_time.model.vocabulary * step_time.model.hidden_size
    minimum = (memory.weights - embedding) / step_time.hardware.memory_bandwidth
    lowest = dict.fromkeys((*ABOUT, WHOLE_STEP), -5.0)
    bound = step_time.vary(lowest)
    (seconds,) = bound.decode_seconds(1, 1000, 1000, 1)
    assert minimum < seconds < 1.03 * minimum
    assert bound.decode_seconds(3, 300, 100, 20)[7] == bound.seconds(batch(lengths=[107] * 3))
    flops = 2 * 8000 * (step_time.model.parameters - step_time.model.vocabulary * step_time.model.hidden_size * 2)
    assert bound.seconds(batch([(8000, 0)])) > flops / step_time.hardware.flops("fp8")


def test_the_error_is_that_of_the_boards_rows_of_the_model() -> None:
    """Most of its variance is the whole step's, and each part has at most the rest."""

    def deviations(**section: Any) -> dict[str, tuple[float, str]]:
        return {single.name: (single.deviation or 0.0, single.basis) for single in built(**section).unknowns()}

    own = deviations(model="llama-3.1-70b", weights="fp8", tensor_parallel=4)
    cell = board_cell(load_model("llama-3.1-70b"), "h100-sxm", Placement(weights="fp8"), "vllm")
    assert cell.spread < 0.15
    assert own[WHOLE_STEP] == (pytest.approx(cell.spread * STEP_SHARE**0.5), "fitted")
    assert all(deviation <= own[WHOLE_STEP][0] for deviation, basis in own.values() if basis == "fitted")
    another = deviations(model="qwen3-30b-a3b", weights="fp8")
    assert another[WHOLE_STEP] == (pytest.approx(built_in_efficiency().engine.spread * STEP_SHARE**0.5), "held out")


def test_a_device_that_was_not_measured_is_less_certain_and_says_so() -> None:
    native, foreign = built(), built(hardware="mi300x")
    ours, away = ({item.name: item for item in model.unknowns()}["linear_kernels"] for model in (native, foreign))
    assert (ours.basis, away.basis) == ("fitted", "held out")
    assert (away.deviation or 0) > (ours.deviation or 0) > 0
    assert any("kernels of mi300x were not measured" in note for note in foreign.notes())
    # Elementwise kernels were measured on one device alone.
    assert [note for note in native.notes() if "not measured," in note] == [
        "kernels of h100-sxm were not measured, others' efficiencies are used: elementwise kernels"
    ]
    assert foreign.measured_deployment().measured is False


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tensor_parallel": 3}, "step_time.tensor_parallel: got 3, expected a divisor of the 32 heads"),
        (
            {"weights": "fp4"},
            "step_time.weights: got 'fp4', expected one that h100-sxm computes with: bf16, fp8, int8, mxfp4",
        ),
        ({"hardware": "a100-sxm-80gb", "weights": "fp8"}, "step_time.weights: got 'fp8', expected one that a100"),
        (
            {"weights": "mxfp4"},
            "step_time.weights: got 'mxfp4', expected another format: MXFP4 is known of experts only",
        ),
        ({"expert_parallel": True}, "step_time.expert_parallel: got True, expected false, since llama-3.1-8b has no"),
        ({"data_parallel": 2}, "step_time.data_parallel: got 2, expected 1, since llama-3.1-8b has no experts"),
        ({"pipeline_parallel": 40}, "step_time.pipeline_parallel: got 40, expected at most the layers there are (32)"),
        ({"model": "llama-9"}, "model: got 'llama-9', expected a path or one of"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as error:
        built(**section)
    assert str(error.value).startswith(message)


def test_more_devices_than_kv_heads_keep_one_each() -> None:
    """Llama-3.1-8B has 8 KV heads: 16 devices hold 16 copies' worth."""
    eight, sixteen = (model_of(tensor_parallel=n).kv_tokens(0.9, 256) for n in (8, 16))
    assert sixteen == pytest.approx(eight, rel=0.03)


def test_stages_and_messages_sum_to_the_step() -> None:
    """Layers are shared out, the head and the sampled tokens are the last stage's, and the launch is the first's."""
    four = model_of(pipeline_parallel=4)
    mixed = batch([(700, 300), (64, 0)], lengths=[450] * 20)
    shares = [0.25] * 4
    result = four.stage_seconds(mixed, shares)
    message = four.send_seconds(mixed.tokens)
    assert message is not None
    assert sum(result) + 3 * message == pytest.approx(four.seconds(mixed), rel=1e-12)
    assert result[1] == result[2] < result[3]
    single = model_of()
    assert single.stage_seconds(mixed, [1.0]) == [single.seconds(mixed)]
    assert single.send_seconds(10) is None
    # A layer is a layer: three quarters of them take three times as long, without the ends.
    long, short = four.stage_seconds(mixed, [0.0, 0.75, 0.25, 0.0])[1:3]
    assert long == pytest.approx(3 * short)


def test_the_stage_with_the_least_memory_bounds_the_cache() -> None:
    """Three stages have 11, 11 and 10 of 32 layers, and the first has the embedding besides."""
    model, hardware = load_model("llama-3.1-8b"), load_hardware("l40s")
    memory = device_memory(model, hardware, Placement(pipeline_parallel=3))
    single = device_memory(model, hardware, Placement())
    embedding = model.vocabulary * model.hidden_size * 2.0
    layer = (single.weights - 2 * embedding) / model.layers
    assert memory.weights == pytest.approx(11 * layer + embedding)
    assert memory.kv_bytes_per_token == pytest.approx(single.kv_bytes_per_token * 11 / 32)
    free = [
        0.9 * hardware.memory_capacity - RESERVED - n * layer - e * embedding for n, e in ((11, 1), (11, 0), (10, 1))
    ]
    tokens = [item / (n * single.kv_bytes_per_token / 32) for item, n in zip(free, (11, 11, 10), strict=True)]
    assert memory.kv_tokens == pytest.approx(min(tokens))


def test_a_model_is_pickled_for_other_processes_and_shared_by_the_runs_of_one() -> None:
    step_time = model_of().vary({"whole_step": 1.0})
    pickled = pickle.loads(pickle.dumps(step_time))
    assert pickled.decode_seconds(8, 9000, 2000, 3) == step_time.decode_seconds(8, 9000, 2000, 3)
    assert copy.deepcopy(step_time) is step_time
