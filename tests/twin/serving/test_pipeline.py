"""Engines with pipeline stages: the textbook's bubbles, the flow-shop recurrence, and engines without stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latency_models.stages import StageLink, Stages
from tests.twin.serving.by_hand import TICK, play, requests
from tests.twin.serving.scenarios import plan_for, records, reported, run, scenario
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.summary import pooled_gaps
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput

NO_TIME = {"bandwidth": 1e12, "bytes_per_token": 0.0}
"""A link that takes none."""


def stages(layers: list[int], link: dict[str, float] | None = None, **engine: Any) -> dict[str, Any]:
    """An engine with these stages, whose batches have one prompt each."""
    link = link or NO_TIME
    pipeline = {"pipeline_parallel_size": len(layers), "pipeline": {"layers": layers, "link": link}}
    return {"num_gpu_blocks": 1000, "max_num_batched_tokens": 64, "max_num_seqs": 64, **pipeline, **engine}


def one_a_batch(prompts: list[int], layers: list[int], link: dict[str, float] | None = None) -> list[float]:
    """When prompts that come at once are answered, in ticks, if each fills a batch. A tick a token for all stages."""
    maximum = max(prompts)
    engine = stages(layers, link, max_num_batched_tokens=maximum, max_num_seqs=1)
    # Of one-shot prompts, which take no slot, a batch has at most one.
    engine["one_shot"] = {"tokens": maximum, "sequences": 1}
    return requests(play([(0, tokens, 1) for tokens in prompts], engine=engine))["last_token"]


def flow_shop(durations: list[list[float]], depth: int) -> list[float]:
    """Completion of jobs on machines in a row: C[i][j] = max(C[i - 1][j], C[i][j - 1]) + t[i][j] (Johnson 1954).

    At most `depth` jobs are in the shop at a time.
    """
    machines = len(durations[0])
    completed: list[list[float]] = []
    for i, job in enumerate(durations):
        ends: list[float] = []
        for j in range(machines):
            before = ends[-1] if j else (completed[i - depth][-1] if i >= depth else 0.0)
            ends.append(max(completed[i - 1][j] if i else 0.0, before) + job[j])
        completed.append(ends)
    return [ends[-1] for ends in completed]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 8, 40])
def test_bubbles_are_those_of_the_textbook(size: int, count: int) -> None:
    """(p - 1) / (m + p - 1) for m micro-batches through p equal stages (GPipe, arXiv:1811.06965, section 2.3)."""
    engine = stages([1] * size, max_num_batched_tokens=8, max_num_seqs=1, one_shot={"tokens": 8, "sequences": 1})
    document = scenario(engine=engine)
    result = play([(0, 8, 1)] * count, engine=engine)
    (summary,) = reported(result, document)["engines"]
    assert summary["bubbles"] == pytest.approx((size - 1) / (count + size - 1), rel=1e-12)
    assert result.end == pytest.approx((count + size - 1) * 8 * TICK / size, rel=1e-12)


@pytest.mark.parametrize("layers", [[1, 1], [3, 1], [1, 3], [2, 1, 5], [1, 2, 1, 4]])
def test_alike_batches_complete_as_in_a_flow_shop_without_a_limit(layers: list[int]) -> None:
    """One batch a stage is enough: the slowest stage never waits for a batch that has not begun."""
    total = sum(layers)
    jobs = [[8 * layer / total for layer in layers]] * 12
    assert one_a_batch([8] * 12, layers) == pytest.approx(flow_shop(jobs, depth=1000), rel=1e-12)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=15),
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.sampled_from([0.0, 0.25, 3.0]),
)
def test_batches_complete_as_in_a_flow_shop(prompts: list[int], layers: list[int], message: float) -> None:
    """Stages and links are machines: the links take `message` ticks and a quarter of a tick for each token."""
    link = {"latency": message * TICK, "bandwidth": 4.0, "bytes_per_token": TICK}
    total, jobs = sum(layers), []
    for tokens in prompts:
        job = [tokens * layers[0] / total]
        for layer in layers[1:]:
            job += [message + tokens / 4, tokens * layer / total]
        jobs.append(job)
    assert one_a_batch(prompts, layers, link) == pytest.approx(flow_shop(jobs, len(layers)), rel=1e-12)


def with_one_stage(plan: ServingPlan) -> ServingPlan:
    """The same plan, simulated as a pipeline of a single stage."""
    single = Stages((7,), StageLink(1.0, 1.0, 1.0))
    return replace(plan, pools=[replace(pool, scheduler=replace(pool.scheduler, stages=single)) for pool in plan.pools])


def busy_document(seed: int, blocks: int, failing: bool, rate: float, **engine: Any) -> dict[str, Any]:
    return scenario(
        seed=seed,
        workload={
            "arrivals": {"process": "poisson", "rate": rate},
            "decode": {"distribution": "uniform", "low": 1, "high": 60},
            "max_tokens": 50,
            "prefixes": {"groups": 3, "tokens": 40, "cache_suffix": True},
        },
        engine={"num_gpu_blocks": blocks, **engine},
        system={"layout": "colocated", "replicas": 2},
        failures=[{"engine": "engine-1", "at": 0.3, "duration": 0.5}] if failing else [],
    )


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 10**6), st.sampled_from([24, 60, 400]), st.booleans(), st.sampled_from([15.0, 60.0]))
def test_one_stage_is_an_engine_without_stages(seed: int, blocks: int, failing: bool, rate: float) -> None:
    """To the last bit of every record."""
    document = {**busy_document(seed, blocks, failing, rate), "fast_forward": False}
    plan = plan_for(document)
    plain, pipelined = Simulation(plan).run(), Simulation(with_one_stage(plan)).run()
    assert pipelined.engines[0].stage_busy, "it is a pipeline"
    assert records(pipelined) == records(plain)
    gaps = [pooled_gaps(row.logs, plan.scenario.measure) for row in (plain, pipelined)]
    counts = [sorted(np.repeat(values, weights).tolist()) for values, weights in gaps]
    assert counts[0] == counts[1]


@settings(max_examples=settings().max_examples * 2 // 3)
@given(
    st.integers(0, 10**6), st.sampled_from([24, 40, 400]), st.booleans(), st.sampled_from([15.0, 60.0, 300.0]),
    st.lists(st.integers(1, 4), min_size=2, max_size=5),
)  # fmt: skip
def test_requests_and_blocks_are_conserved(
    seed: int, blocks: int, failing: bool, rate: float, layers: list[int]
) -> None:
    """`Simulation.run` checks that every request ended once and every block is free."""
    link = {"latency": 1e-4, "bandwidth": 1e6, "bytes_per_token": 10.0}
    document = busy_document(seed, blocks, failing, rate, **stages(layers, link, num_gpu_blocks=blocks))
    result = run(document)
    summary = reported(result, document)["summary"]
    assert summary["littles_law_error"] < 1e-9
    columns = result.columns.table()
    assert sorted(columns["id"].tolist()) == list(range(60))
    if not failing:  # the gaps between the tokens of a request sum to what it was decoded for
        gaps, weights = pooled_gaps(result.logs, plan_for(document).scenario.measure)
        assert (gaps * weights).sum() == pytest.approx((columns["last_token"] - columns["first_token"]).sum())
        assert weights.sum() == columns["output_tokens"].sum() - 60
    for engine in result.engines:
        assert max(engine.stage_busy) <= engine.log.busy * (1 + 1e-12)


def decoding(layers: list[int], concurrency: int) -> dict[str, Any]:
    """Answers of 400 tokens in steps of 10 ms, at most four sequences a batch at the start."""
    engine = stages(layers) if len(layers) > 1 else {"num_gpu_blocks": 1000}
    return scenario(
        workload={
            "requests": concurrency,
            "arrivals": {"process": "closed_loop", "concurrency": concurrency},
            "prefill": {"distribution": "fixed", "mean": 16},
            "decode": {"distribution": "fixed", "mean": 400},
        },
        engine={**engine, "max_num_batched_tokens": 64, "max_num_seqs": 64},
        step_time={"source": "linear", "overhead": 0.01, "per_token": 0.0, "per_kv_token": 0.0},
    )


@pytest.mark.parametrize("layers", [[1, 1], [3, 1], [1, 1, 1, 1], [1, 2, 1, 4]])
def test_with_a_batch_for_each_stage_the_slowest_stage_sets_the_pace(layers: list[int]) -> None:
    """Steps a second approach 1 / the slowest stage's seconds; with a single batch they are 1 / all stages' seconds."""
    slowest = 0.01 * max(layers) / sum(layers)
    full = run(decoding(layers, 4 * len(layers)))
    assert full.logs[0].num_steps / full.end == pytest.approx(1 / slowest, rel=0.02)
    single = run(decoding(layers, 4))
    assert single.logs[0].num_steps / single.end == pytest.approx(100.0, rel=0.02)


def test_a_story_by_hand() -> None:
    """Two stages, half a tick a token each. Prompts of 8 and 8 fill a batch each; answers of 3 tokens.

    The first prompt is at stage 1 until 4 and at stage 2 until 8, the second until 8 and 12. The decodes take half a
    tick a stage: the first one's from 8 to 9, its next from 9 to 10, while the second prompt holds stage 2 until 12:
    so it leaves stage 1 at 8.5 and stage 2 at 12.5.
    """
    result = play([(0, 8, 3), (0, 8, 3)], engine=stages([1, 1], max_num_batched_tokens=8, max_num_seqs=4))
    table = requests(result)
    assert table["first_token"] == [8.0, 12.0]
    # The first sequence: 12.5, then 13.5. The second: begins at 12, stage 1 until 12.5, stage 2 until 13; then 13.5
    # at stage 1 (free since 13), stage 2 until 14.
    assert table["last_token"] == [13.5, 14.0]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (
            {"pipeline_parallel_size": 2},
            "engine.pipeline.link: expected bandwidth and bytes_per_token, since step_time",
        ),
        ({"pipeline": {}}, "expected no pipeline with pipeline_parallel_size 1"),
        (stages([1, 1, 1], pipeline_parallel_size=2), "engine.pipeline.layers: got [1, 1, 1], expected 2 numbers"),
        (stages([1, 1], async_scheduling=True), "expected no async_scheduling with pipeline_parallel_size above 1"),
        (stages([1, 1], data_parallel_size=2), "expected data_parallel_size 1 with pipeline_parallel_size above 1"),
    ],
)
def test_what_is_refused(engine: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInput) as error:
        prepare(scenario(engine=engine), Path("scenario.yaml"))
    assert expected in str(error.value)
