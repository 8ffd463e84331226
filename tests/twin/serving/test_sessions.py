"""Sessions in a simulation: worked out by hand, and never out of order, whatever fails or is preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.reading import read_scenario
from scenarios.validation import check_validation
from tests.twin.serving.by_hand import STEP, TICK
from tests.twin.serving.scenarios import plan_for, run, run_both_ways, scenario
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.summary import Run, summarise
from twin.serving.run.simulation import Simulation, realisation
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput
from workloads.sessions import DrawnSessions

FIXED = {"distribution": "fixed"}
THREE_TURNS = {
    "requests": 3,
    "prefill": {**FIXED, "mean": 32},
    "decode": {**FIXED, "mean": 17},
    "arrivals": {"process": "closed_loop", "concurrency": 1},
    "sessions": {
        "source": "drawn",
        "turns": {**FIXED, "mean": 3},
        "growth": {**FIXED, "mean": 15},
        "think": {"mean": 10 * TICK, "cv": 0.0},
    },
}


def workload(**changes: Any) -> dict[str, Any]:
    sessions = THREE_TURNS["sessions"] | changes.pop("sessions", {})  # type: ignore[operator]
    return THREE_TURNS | {"sessions": sessions} | changes


def by_id(result: Run) -> dict[str, list[Any]]:
    """Columns of the requests in the order of their ids; times in ticks."""
    table = result.request_table()
    order = np.argsort(table["id"])
    times = ("arrival", "first_token", "last_token")
    return {name: (values[order] / TICK if name in times else values[order]).tolist() for name, values in table.items()}


def summary(result: Run, document: dict[str, Any]) -> dict[str, Any]:
    return summarise(result, plan_for(document).scenario.measure)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_session_of_three_turns(fast: bool, asynchronous: bool) -> None:
    """A tick for every token. Of what was said all whole blocks of 16 are found but for the last token's.

    Prompt 32, done at 32, 16 decodes until 48. Said: 49 tokens, of which 48 are cached. At 58 a prompt of 64 computes
    16: 74, answered at 90. Said: 81, cached 80. At 100 a prompt of 96 computes 16: 116, answered at 132.
    """
    document = scenario(
        workload=workload(), step_time=STEP, fast_forward=fast, engine={"async_scheduling": asynchronous}
    )
    result = run(document)
    answers = by_id(result)
    assert answers["arrival"] == [0, 58, 100]
    assert answers["first_token"] == [32, 74, 116]
    assert answers["last_token"] == [48, 90, 132]
    assert answers["prompt_tokens"] == [32, 64, 96]
    assert answers["cached_tokens"] == [0, 48, 80]
    assert (answers["session"], answers["turn"]) == ([0, 0, 0], [0, 1, 2])
    sessions = summary(result, document)["sessions"]
    assert (sessions["count"], sessions["turns"], sessions["requests"]) == (1, 3, 3)
    assert sessions["time"]["mean"] == 132 * TICK
    assert sessions["waited"]["mean"] == (48 + 32 + 32) * TICK
    assert sessions["resent_tokens"] == 49 + 81
    assert sessions["resent_share"] == pytest.approx(130 / 192)
    assert sessions["resent_cached"] == pytest.approx(128 / 130)


def test_without_a_cache_everything_is_computed_again() -> None:
    document = scenario(workload=workload(), step_time=STEP, engine={"enable_prefix_caching": False})
    result = run(document)
    assert by_id(result)["last_token"] == [48, 58 + 64 + 16, 148 + 96 + 16]
    assert summary(result, document)["sessions"]["resent_cached"] == 0


@pytest.mark.parametrize("fast", [True, False])
def test_branches_share_what_was_said(fast: bool) -> None:
    """Two prompts of 64 find 48 each and take a step of 32: 58 + 32. 16 steps of two decodes: 122. Said: 81; at 132 two
    prompts of 96 find 80 each: 164, 196."""
    document = scenario(
        workload=workload(requests=5, sessions={"branches": {"share": 1.0, "count": 2}}),
        step_time=STEP,
        fast_forward=fast,
    )
    result = run(document)
    answers = by_id(result)
    assert answers["arrival"] == [0, 58, 58, 132, 132]
    assert answers["last_token"] == [48, 122, 122, 196, 196]
    assert answers["cached_tokens"] == [0, 48, 48, 80, 80]
    assert answers["turn"] == [0, 1, 1, 2, 2]


def test_a_tool_pauses_a_session_for_its_own_time() -> None:
    tools = {"share": 1.0, "pause": {"mean": 3 * TICK, "cv": 0.0}, "growth": {**FIXED, "mean": 31}}
    result = run(scenario(workload=workload(sessions={"tools": tools}), step_time=STEP))
    assert by_id(result)["arrival"] == [0, 51, 51 + 32 + 16 + 3]


def test_users_begin_a_session_when_their_last_one_has_ended() -> None:
    """Two users in step; the second session of each begins 5 ticks after its first has ended."""
    arrivals = {"process": "closed_loop", "concurrency": 2, "think": 5 * TICK}
    result = run(
        scenario(workload=workload(requests=6, arrivals=arrivals, sessions={"turns": {**FIXED, "mean": 1}}))
        | {"step_time": STEP | {"source": "linear"}}
    )
    answers = by_id(result)
    assert answers["session"] == [0, 1, 2, 3, 4, 5]
    ends = answers["last_token"]
    assert answers["arrival"] == [0, 0, ends[0] + 5, ends[1] + 5, ends[2] + 5, ends[3] + 5]


def test_open_sessions_begin_at_their_times() -> None:
    arrivals = {"process": "deterministic", "rate": 1 / (20 * TICK)}
    result = run(scenario(workload=workload(requests=7, arrivals=arrivals), step_time=STEP))
    answers = by_id(result)
    first = [arrival for arrival, turn in zip(answers["arrival"], answers["turn"], strict=True) if turn == 0]
    assert first == [20, 40, 60]


# -- whatever happens --------------------------------------------------------------------------------------------------


def check(plan: ServingPlan, result: Run, failing: bool) -> None:
    """Every request of every session, once, with its own lengths, and after the answers that it repeats."""
    assert isinstance(plan.workload, DrawnSessions)
    table = result.request_table()
    assert sorted(table["id"].tolist()) == list(range(plan.requests))
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for i in np.argsort(table["id"]):
        row = {name: values[i].item() for name, values in table.items()}
        rows.setdefault((row["session"], row["turn"]), []).append(row)
    seeds = np.random.SeedSequence([plan.scenario.seed, 0]).spawn(3)
    for session in plan.workload.sessions(np.random.default_rng(seeds[0]), plan.requests):
        answered = 0.0
        for turn, round in enumerate(session.rounds):
            requests_of_turn = rows.pop((session.id, turn))
            assert [row["prompt_tokens"] for row in requests_of_turn] == [prompt.tokens for prompt in round.prompts]
            assert [row["output_tokens"] for row in requests_of_turn] == [
                prompt.answer_tokens for prompt in round.prompts
            ]
            if turn:
                assert {row["arrival"] for row in requests_of_turn} == {answered + round.pause}
            elif session.arrival:
                assert {row["arrival"] for row in requests_of_turn} == {session.arrival}
            for row, prompt in zip(requests_of_turn, round.prompts, strict=True):
                assert row["arrival"] < row["first_token"] <= row["last_token"]
                if not failing:  # an engine that has failed computes the tokens so far as a prompt
                    assert row["cached_tokens"] < prompt.tokens
            answered = max(row["last_token"] for row in requests_of_turn)
    assert rows == {}
    for engine in result.engines:
        assert engine.load == 0


@settings(max_examples=settings().max_examples // 2)
@given(
    seed=st.integers(0, 10_000),
    blocks=st.sampled_from([14, 20, 60, 400]),
    users=st.sampled_from([None, 1, 4, 9]),
    share=st.sampled_from([0.0, 0.5]),
    asynchronous=st.booleans(),
    layout=st.sampled_from(["colocated", "disaggregated"]),
    failures=st.lists(
        st.fixed_dictionaries(
            {
                "engine": st.sampled_from([0, 1]),
                "at": st.floats(0.0, 1.5),
                "duration": st.sampled_from([1e-6, 0.05, 0.5]),
            }
        ),
        max_size=3,
    ),
    cached_when=st.sampled_from(["scheduled", "computed"]),
)
def test_no_session_is_out_of_order(
    seed: int, blocks: int, users: int | None, share: float, asynchronous: bool, layout: str,
    failures: list[dict[str, Any]], cached_when: str,
) -> None:  # fmt: skip
    names = ["engine-0", "engine-1"] if layout == "colocated" else ["prefill-0", "decode-0"]
    system: dict[str, Any] = {"layout": "colocated", "replicas": 2}
    if layout != "colocated":
        system = {"layout": layout, "link": {"bandwidth": 1e6, "bytes_per_token": 100.0}}
    closed = {"process": "closed_loop", "concurrency": users, "think": 0.02, "think_cv": 1.0}
    document = scenario(
        seed=seed,
        workload={
            "requests": 40,
            "prefill": {"distribution": "uniform", "low": 1, "high": 60},
            "decode": {"distribution": "geometric", "mean": 15},
            "arrivals": closed if users else {"process": "poisson", "rate": 40.0},
            "sessions": {
                "source": "drawn",
                "turns": {"distribution": "geometric", "mean": 4},
                "growth": {"distribution": "uniform", "low": 0, "high": 20},
                "think": {"mean": 0.03},
                "branches": {"share": share, "count": 3},
                "tools": {"share": share, "pause": {"mean": 0.01}, "growth": {**FIXED, "mean": 9}},
                "max_model_len": 200,
            },
        },
        engine={"num_gpu_blocks": blocks, "async_scheduling": asynchronous, "cache_blocks_on": cached_when},
        system=system,
        failures=[{**failure, "engine": names[failure["engine"]]} for failure in failures],
    )
    plan = plan_for(document)
    result, _ = run_both_ways(document)
    check(plan, result, bool(failures))


def test_small_caches_preempt_in_these_tests() -> None:
    """So that the property is one of preempted requests, too."""
    long = {"requests": 200, "sessions": {"turns": {**FIXED, "mean": 4}, "growth": {**FIXED, "mean": 15}}}
    users = {"process": "closed_loop", "concurrency": 9}
    document = scenario(
        workload=workload(**long, arrivals=users), engine={"num_gpu_blocks": 14, "max_num_batched_tokens": 256}
    )
    assert summary(run(document), document)["preemptions"] > 10


# -- input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prefill": None, "trace": {"path": "t.csv"}, "decode": None},
            "sessions.source: got 'drawn', expected session_ids",
        ),
        ({"sessions": {"turns": {**FIXED, "mean": 0}}}, "sessions.turns: got 0, expected at least 1 in every draw"),
        ({"sessions": {"think": {"mean": 1.0, "cv": 1e-9}}}, "think.*expected 0, or at least 0.001"),
        ({"sessions": {"branches": {"share": 2.0, "count": 2}}}, "branches.share"),
    ],
)
def test_what_cannot_be_used_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        prepare(scenario(workload=workload(**changes)), Path("s.yaml"))


def test_requests_of_sessions_cannot_be_listed_before_they_are_answered() -> None:
    plan = plan_for(scenario(workload=workload()))
    with pytest.raises(BadInput, match=r"workload\.sessions: expected none"):
        realisation(plan, 0)


def test_a_validation_of_several_engines_refuses_sessions() -> None:
    path = Path(__file__).parents[3] / "examples" / "validate-pd-cpu.yaml"
    document = read_scenario(path, "validation")
    document["workload"]["sessions"] = workload()["sessions"]
    with pytest.raises(BadInput, match=r"workload\.sessions: expected none"):
        check_validation(document, {}, path)


def test_replications_differ_where_sessions_are_drawn() -> None:
    fixed = plan_for(scenario(workload=workload()))
    assert fixed.random == ()
    thinking = workload(sessions={"think": {"mean": 1.0}})
    assert plan_for(scenario(workload=thinking)).random == ("think_times",)


# -- sessions of a trace -----------------------------------------------------------------------------------------------

LOGGED = """arrival,prompt_tokens,output_tokens,session
0,32,17,a
0.25,64,17,a
0.5,16,2,b
8,96,17,a
"""


@pytest.mark.parametrize("fast", [True, False])
def test_turns_of_a_trace_come_at_their_times_or_after_the_answer_before_them(tmp_path: Path, fast: bool) -> None:
    """In ticks of 1/64 s. The first prompt is computed at 32. Then the other session's request comes, whose 16 tokens
    take a step with one decode, 17, and whose second token one of two decodes: 51. The first answer is complete at 65,
    so its session sends the second turn then, although it was recorded at 16. The last turn comes at its own time.
    """
    (tmp_path / "log.csv").write_text(LOGGED)
    document = scenario(step_time=STEP, fast_forward=fast)
    document["workload"] = {
        "trace": {"path": "log.csv"},
        "arrivals": {"process": "replay"},
        "sessions": {"source": "session_ids"},
    }
    plan = prepare(document, tmp_path / "s.yaml").cases[0].plan
    result = Simulation(plan).run()
    answers = by_id(result)
    assert answers["session"] == [0, 1, 0, 0]
    assert answers["arrival"] == [0, 32, 65, 512]
    assert answers["last_token"] == [65, 51, 97, 544]
    assert answers["cached_tokens"] == [0, 0, 48, 80]
    assert plan.replayed["rows"] == 4


def test_sessions_of_a_trace_may_have_users_and_think_times(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(LOGGED)
    document = scenario(step_time=STEP)
    document["workload"] = {
        "trace": {"path": "log.csv"},
        "arrivals": {"process": "closed_loop", "concurrency": 1},
        "sessions": {"source": "session_ids", "think": {"mean": 10 * TICK, "cv": 0.0}},
    }
    result = Simulation(prepare(document, tmp_path / "s.yaml").cases[0].plan).run()
    assert by_id(result)["arrival"] == [0, 58, 100, 132]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sessions": {"source": "prefix_ids"}}, "sessions.source: got 'prefix_ids', expected a trace with prefix ids"),
        (
            {"arrivals": {"process": "poisson", "rate": 1.0}},
            "arrivals.process: got 'poisson', expected replay for turns",
        ),
        ({"prefixes": {"groups": 1, "tokens": 16}}, "prefixes: expected none with the sessions of a trace"),
        ({"requests": 5}, "workload.requests: got 5, expected at most the 4 rows of the trace, whose sessions are"),
        ({"trace": {"path": "log.csv", "pairing": "independent"}}, "expected drawn without a trace of pairing joint"),
        ({"sessions": THREE_TURNS["sessions"]}, "sessions.source: got 'drawn', expected session_ids or prefix_ids"),
    ],
)
def test_sessions_of_a_trace_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "log.csv").write_text(LOGGED)
    document = scenario()
    document["workload"] = {
        "trace": {"path": "log.csv"},
        "arrivals": {"process": "replay"},
        "sessions": {"source": "session_ids"},
        **changes,
    }
    with pytest.raises(BadInput, match=message):
        prepare(document, tmp_path / "s.yaml")


AGENTS = """\
trace,agent,t,in,out,api_time,think_time,block_ids
a,0,0.0,64,1,1.0,0.0,1
a,1,0.0,64,1,1.0,,90
a,1,3.0,64,3,1.0,2.0,90
a,2,0.0,64,1,1.0,,80
a,0,9.0,64,1,1.0,,1
b,0,0.0,64,1,1.0,0.0,1
"""


@pytest.mark.parametrize("fast", [True, False])
def test_sub_agents_run_side_by_side_and_their_session_follows_them(tmp_path: Path, fast: bool) -> None:
    """The main agent goes on 8 s after its answer, of which the longer sub-agent takes 4: the pause is 4 s."""
    path = tmp_path / "agents.csv"
    path.write_text(AGENTS)
    document = scenario(step_time=STEP, fast_forward=fast)
    document["workload"] = {
        "trace": {"path": str(path), "format": "agents"},
        "sessions": {"source": "session_ids", "think": "recorded"},
        "arrivals": {"process": "closed_loop", "concurrency": 1},
    }
    table = by_id(run(document))
    # requests by id: main, then 1 and 2 at once, the second of 1, the last of main, session b
    sent, ended = table["arrival"], table["last_token"]
    assert sent[1] == sent[2] == ended[0]
    pause = 2.0 / TICK
    assert sent[3] == pytest.approx(ended[1] + pause)
    assert sent[4] == pytest.approx(max(ended[2], ended[3]) + (9.0 - 1.0 - 4.0) / TICK)
    assert sent[5] == pytest.approx(ended[4])
    assert table["session"] == [0, 0, 0, 0, 0, 1]


def test_users_send_no_more_when_their_time_is_over(tmp_path: Path) -> None:
    changed = workload(requests=30, arrivals={"process": "closed_loop", "concurrency": 2, "duration": 100 * TICK})
    result = run(scenario(workload=changed, step_time=STEP))
    table = by_id(result)
    assert 0 < len(table["arrival"]) < 30
    assert max(table["arrival"]) < 100 <= max(table["last_token"]) + 100
    endless = workload(requests=30, arrivals={"process": "closed_loop", "concurrency": 2})
    whole = by_id(run(scenario(workload=endless, step_time=STEP)))
    assert table["last_token"] == whole["last_token"][: len(table["arrival"])]
