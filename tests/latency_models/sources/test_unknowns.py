"""Unknowns of every source: draws that differ, and agree with themselves to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latency_models.fitting.linear import BrokenLine
from latency_models.interpolation import Curve, Surface
from latency_models.io.config_io import checked
from latency_models.sources.afd_bundle import AfdBundleSpec
from latency_models.sources.aiconfigurator.kernels import ModelKernels
from latency_models.sources.aiconfigurator.spec import AiconfiguratorStepTime, Corrections
from latency_models.sources.ec_tables import EcTables, LayerTables, Selection
from latency_models.sources.engine_regression import EngineRegression
from latency_models.sources.kernel_tables.settings import Communication
from latency_models.sources.linear import LinearStepTime
from latency_models.sources.refined import RefinedStepTime
from latency_models.sources.roofline.spec import RooflineSpec
from latency_models.sources.vllm_step_log.spec import StepRegression
from latency_models.step_time import StepTime
from schedulers.batches import Batch
from tests.latency_models.sources.kernel_tables.small_tables import TINY, batch, experts_of, load, make_tables
from tests.latency_models.sources.kernel_tables.test_files import add_experts, add_skew
from tests.latency_models.sources.vllm_step_log.test_step_time import made_up

LINK = Communication(latency=5e-6, bandwidth=2e10, source="a guess")


def engine_regression() -> EngineRegression:
    model = EngineRegression(16)
    model.overhead_ = 1e-3
    model.slopes_ = {"decodes": 1e-5, "chunks": 1e-4, "outputs": 1e-6}
    line = BrokenLine(knots=[8, 64], values=[1e-4, 2e-3])
    model.lines_ = dict.fromkeys(("rows", "decode_attention", "chunk_attention"), line)
    model.largest_ = {"rows": 64, "decode_attention": 64, "chunk_attention": 64}
    model.points_ = 40
    model.heldout_median_error_ = 0.03
    model.repeat_spread_ = 0.01
    return model


def aiconfigurator() -> AiconfiguratorStepTime:
    curve = Curve([(1, 1e-3), (512, 9e-3)])
    surface, part = Surface({1: curve, 8: curve}), Curve([(1, 1e-4), (512, 1e-3)])
    kernels = ModelKernels(2, curve, curve, curve, surface, experts=part, collectives=part)
    return AiconfiguratorStepTime(kernels, Corrections(prompt_step=1e-3))


def ec_tables() -> EcTables:
    layers = {"qkv": [1.0, 2.0], "o": [1.0, 2.0], "gate_up": [1.0, 2.0], "down": [1.0, 2.0]}
    document = {
        "schema": "twin.ec-tables/1", "source": "made up", "layers": 2, "tokens": [1, 512],
        "attention": [1.0, 2.0], "w4": layers, "ec": layers,
    }  # fmt: skip
    return EcTables(LayerTables.model_validate(document), Selection(density=0.5), spread=0.1)


def step_regression() -> StepRegression:
    """The source that is fitted to a log of small batches."""
    log = made_up(2000, noise=0.05)
    return StepRegression(late=False).fit(log.where(log.decodes < 30))


def roofline(name: str, **section: object) -> StepTime:
    fields = {"source": "roofline", "model": name, "hardware": "h100-sxm", **section}
    return checked(RooflineSpec, fields, None).build(Path())


def afd_bundle() -> StepTime:
    fields = {"source": "afd_bundle", "model": "qwen3-30b-a3b", "hardware": "h100-sxm", "attention_instances": 3}
    return checked(AfdBundleSpec, {**fields, "context_cv": 0.5}, None).build(Path())


def refined(prior: StepTime) -> StepTime:
    """Two unknowns of which a run has told the sum."""
    covariance = np.array([[0.5, -0.4], [-0.4, 0.6]])
    return RefinedStepTime(prior, ["engine", "decode_attention"], np.array([0.7, -0.2]), covariance, 0.02)


MODELS: dict[str, Callable[[Path], StepTime]] = {
    "linear": lambda folder: LinearStepTime(1e-2, 1e-4, 1e-7, 1e-8, spread=0.1),
    "engine_regression": lambda folder: engine_regression(),
    "kernel_tables": lambda folder: load(make_tables(folder), overhead=1e-4, kernel_gap=1e-6),
    "two ranks": lambda folder: load(make_tables(folder / "tp2"), tensor_parallel=2, communication=LINK),
    "ec_tables": lambda folder: ec_tables(),
    "aiconfigurator": lambda folder: aiconfigurator(),
    "roofline": lambda folder: roofline("llama-3.1-8b", tensor_parallel=1),
    "refined": lambda folder: refined(load(make_tables(folder), overhead=1e-4, kernel_gap=1e-6)),
    "afd_bundle": lambda folder: afd_bundle(),
    "roofline of experts": lambda folder: roofline("qwen3-30b-a3b", tensor_parallel=2),
    "experts and skew": lambda folder: load(add_experts(add_skew(make_tables(folder))), experts_of(TINY)),
    "vllm_step_log": lambda folder: step_regression(),
}


@pytest.fixture(params=MODELS, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StepTime:
    return MODELS[request.param](tmp_path_factory.mktemp("tables") / "tp1")


PROBES: tuple[Batch, ...] = (
    batch(lengths=[100, 200]),
    batch(lengths=[300] * 30),
    batch(lengths=[100], chunks=[(100, 0), (30, 20)]),
    batch(lengths=[9000] * 9, chunks=[(900, 4000)]),
)


def durations(model: StepTime) -> list[float]:
    return [model.seconds(probe) for probe in PROBES]


def test_estimates_are_the_model_itself(model: StepTime) -> None:
    assert model.can_draw
    assert durations(model.vary({})) == pytest.approx(durations(model), rel=1e-12)
    assert durations(model.vary({"no such name": 3.0})) == pytest.approx(durations(model), rel=1e-12)


def test_each_unknown_alone_moves_some_step_and_none_to_zero(model: StepTime) -> None:
    for unknown in model.unknowns():
        longer = durations(model.vary({unknown.name: 2.0}))
        assert longer != durations(model), unknown.name
        assert min(longer + durations(model.vary({unknown.name: -4.0}))) > 0
        assert unknown.about
        assert unknown.measure


def test_draws_scatter_and_are_repeatable(model: StepTime) -> None:
    draws = np.log([durations(model.draw(np.random.default_rng(seed))) for seed in range(40)])
    assert (draws.std(axis=0) > 0.005).all()
    assert np.log(durations(model.draw(np.random.default_rng(3)))).tolist() == draws[3].tolist()


@given(
    lengths=st.lists(st.integers(1, 6000), min_size=1, max_size=40), steps=st.integers(0, 40), seed=st.integers(0, 3)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_successive_decode_steps_are_each_one_to_the_last_bit(
    model: StepTime, lengths: list[int], steps: int, seed: int
) -> None:
    """Models are the estimate (seed 0) and draws."""
    times = model.draw(np.random.default_rng(seed)) if seed else model
    one_by_one = [times.seconds(batch(lengths=[length + i for length in lengths])) for i in range(steps)]
    assert times.decode_seconds(len(lengths), sum(lengths), max(lengths), steps) == one_by_one


def test_draws_are_wider_beyond_the_tables(tmp_path: Path) -> None:
    model = load(make_tables(tmp_path), overhead=1e-4)
    inside, beyond = batch(lengths=[500] * 8), batch(lengths=[500] * 8, chunks=[(4096, 0)])
    draws = [model.draw(np.random.default_rng(seed)) for seed in range(60)]
    spread = {probe: np.std([np.log(draw.seconds(probe)) for draw in draws]) for probe in (inside, beyond)}
    assert spread[beyond] > 2 * spread[inside]


def test_overheads_that_a_scenario_leaves_out_can_only_be_longer(tmp_path: Path) -> None:
    model = load(make_tables(tmp_path))
    assert model.vary({"overhead": -1.0}).seconds(PROBES[0]) == model.seconds(PROBES[0])
    assert model.vary({"overhead": 1.0}).seconds(PROBES[0]) - model.seconds(PROBES[0]) == pytest.approx(300e-6)


def test_what_states_no_spread_says_that_its_error_is_unknown() -> None:
    silent = LinearStepTime(1e-2, 1e-4)
    assert silent.unknowns() == ()
    assert not silent.can_draw
    assert silent.draw(np.random.default_rng(0)) is silent
