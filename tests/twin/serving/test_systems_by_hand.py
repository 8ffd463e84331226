"""Ranks in lockstep, outages, caches that move, prefixes and preemptions, each in a run worked out by hand.

A step takes a tick for every token in it, and holds at most 64. Blocks hold 16 tokens.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from scenarios.fields import MeasureSpec
from tests.twin.serving.by_hand import STEP, TICK, play, requests
from tests.twin.serving.scenarios import records, run, scenario
from twin.serving.results.summary import Run, engine_summaries, link_summaries, outages, summarise
from workloads.mixes import ModelMix

both_modes = pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])


def shares(result: Run) -> tuple[float, float, float]:
    """Ticks in which the only engine ran, seats times ticks, and blocks times ticks."""
    (entry,) = engine_summaries(result)
    (engine,) = result.engines
    total = result.end / TICK
    return entry["busy"] * total, entry["load"] * total * engine.max_num_seqs, entry["kv_used"] * total * engine.blocks


@both_modes
def test_ranks_in_lockstep(fast: bool) -> None:
    """The larger of two prompts, 48, sets the first step. Answers end at 49 and 50; the third request runs alone."""
    result = play([(0, 32, 3), (0, 48, 2), (100, 16, 5)], engine={"data_parallel_size": 2}, fast_forward=fast)
    table = requests(result)
    assert (table["first_token"], table["last_token"]) == ([48, 48, 116], [50, 49, 120])
    assert shares(result) == pytest.approx((70, 50 + 49 + 20, (2 * 48 + 3 * 2) + (3 * 48 + 4) + (16 + 2 * 4)))
    summary = summarise(result, MeasureSpec())
    assert (summary["steps"], summary["prefill_tokens"]) == (8, 96)
    assert summary["itl"]["mean"] == pytest.approx(TICK)
    assert (summary["busy"], summary["load"]) == pytest.approx((70 / 120, 119 / 120 / 32))


@both_modes
def test_ranks_in_lockstep_fill_blocks_of_their_own(fast: bool) -> None:
    """Prompts of 16 and 24 and 39 decodes each: in the d-th of them 16 + d and 24 + d tokens are cached."""
    result = play([(0, 16, 40), (0, 24, 40)], engine={"data_parallel_size": 2}, fast_forward=fast)
    assert requests(result)["last_token"] == [63, 63]
    first = 1 * 24 + 2 * 16 + 3 * 16 + 4 * 7
    second = 2 * 24 + 2 * 8 + 3 * 16 + 4 * 15
    assert shares(result) == pytest.approx((63, 2 * 63, first + second))


@both_modes
def test_a_prompt_in_two_chunks_is_scheduled_with_its_first(fast: bool) -> None:
    """The first request begins at time 0 and has the budget of 64 to itself; beside its second chunk the other fits."""
    result = play([(0, 100, 2), (0, 20, 1)], fast_forward=fast)
    table = requests(result)
    assert (table["queued"], table["scheduled"]) == ([0, 0], [0, 64])
    assert (table["first_token"], table["last_token"]) == ([120, 120], [121, 120])


@both_modes
def test_an_outage_in_the_middle_of_an_answer(fast: bool) -> None:
    """At 40.5 the request has the tokens that ended at 16, 17, … 40, which is 25. At 60.5 it begins again with its
    prompt and those, 41 ticks, and then lacks 74.
    """
    failures = [{"engine": "engine-0", "at": 40.5 * TICK, "duration": 20 * TICK}]
    result = play([(0, 16, 100)], failures=failures, fast_forward=fast)
    table = requests(result)
    assert (table["queued"], table["scheduled"]) == ([0], [0])
    assert (table["first_token"], table["last_token"]) == ([16], [60.5 + 41 + 74])
    assert (table["attempts"], table["output_tokens"], table["preemptions"]) == ([1], [100], [0])
    busy, seats, _ = shares(result)
    assert (busy, seats) == pytest.approx((40 + 115, 40.5 + 115))
    assert outages(result) == [{"engine": "engine-0", "start": 40.5 * TICK, "end": 60.5 * TICK}]
    assert summarise(result, MeasureSpec())["prefill_tokens"] == 16 + 41


@both_modes
def test_what_an_engine_had_goes_on_elsewhere(fast: bool) -> None:
    """Two engines; the second fails at 24, in the first step of request 1, and again while it is down."""
    failures = [
        {"engine": "engine-1", "at": 24 * TICK, "duration": 50 * TICK},
        {"engine": "engine-1", "at": 30 * TICK, "duration": 60 * TICK},
    ]
    system = {"layout": "colocated", "replicas": 2, "routing": "round_robin"}
    rows = [(0, 16, 40), (0, 32, 2), (40, 16, 2), (100, 16, 2), (200, 16, 2)]
    result = play(rows, system=system, failures=failures, fast_forward=fast)
    table = requests(result)
    assert outages(result) == [{"engine": "engine-1", "start": 24 * TICK, "end": 90 * TICK}]
    # Request 1 comes to the first engine at 24, and its prompt runs beside a decode until 57. The prompt of request 2
    # runs beside two decodes until 75, and its last decode beside one until 77. Request 0 has 12 tokens then, and 35 at
    # 100, when engines take turns again: request 3 comes beside it, and request 4 to the second engine.
    assert (table["queued"], table["scheduled"]) == ([0, 0, 57, 100, 200], [0, 0, 57, 100, 200])
    assert table["first_token"] == [16, 57, 75, 117, 216]
    assert table["last_token"] == [119 + 3, 75, 77, 119, 217]
    assert table["attempts"] == [0, 1, 0, 0, 0]
    assert [name.removeprefix("engine-") for name in table["replica"]] == ["0", "0", "0", "0", "1"]
    assert [entry["busy"] * 217 for entry in engine_summaries(result)] == pytest.approx([122, 17])


LINK = {"bandwidth": 1000.0 / TICK, "latency": 4 * TICK, "bytes_per_token": 1000.0}
"""A tick for each token of a cache, and four of latency."""


@both_modes
def test_caches_stand_in_line_for_a_link(fast: bool) -> None:
    """Both prompts are computed at 48. The first cache goes from 48 to 80 and is there at 84; the second has waited for
    32 ticks then and is there at 100. The third goes at once, at 316. An answer of one token needs no cache.
    """
    system = {"layout": "disaggregated", "link": LINK}
    rows = [(0, 32, 3), (0, 16, 2), (300, 16, 2), (400, 16, 1)]
    result = play(rows, system=system, fast_forward=fast)
    table = requests(result)
    assert table["first_token"] == [48, 48, 316, 416]
    # Decoded alone: 84 - 86; 100 - 101; 316 + 16 + 4 + 1.
    assert table["last_token"] == [86, 101, 337, 416]
    assert (table["output_tokens"], table["replica"]) == ([3, 2, 2, 1], [*["decode-0"] * 3, "prefill-0"])
    assert link_summaries(result) == [
        {
            "name": "prefill-0",
            "utilization": pytest.approx((32 + 16 + 16) / 416),
            "bytes": 64_000.0,
            "mean_wait": pytest.approx(32 / 3 * TICK),
        }
    ]
    engines = {entry["name"]: entry for entry in engine_summaries(result)}
    assert [entry["busy"] for entry in engines.values()] == pytest.approx([(48 + 16 + 16) / 416, (2 + 1 + 1) / 416])
    assert [entry["steps"] for entry in engines.values()] == [3, 4]
    assert [entry["prefill_tokens"] for entry in engines.values()] == [80, 0]
    # Blocks are kept on the prefill engine until the cache has arrived, and taken on the decode engine from then on.
    retained = 2 * 84 + 100 + (16 + 16 + 4) + 16
    assert engines["prefill-0"]["kv_used"] == pytest.approx(retained / 416 / 400)
    assert engines["decode-0"]["kv_used"] == pytest.approx((3 * 2 + 2 + 2) / 416 / 400)
    # Inter-token latencies: from the first token to the second 37, 53 and 21 ticks, and one of a tick.
    itl = summarise(result, MeasureSpec())["itl"]
    assert itl["mean"] == pytest.approx((37 + 53 + 21 + 1) / 4 * TICK)
    assert itl["p50"] == pytest.approx((21 + 37) / 2 * TICK)


@both_modes
def test_work_between_steps(fast: bool) -> None:
    """Eight ticks to an engine, two from a step's end to the client, and sixteen before a cache leaves.

    Both prompts are at their engine at 8 and computed at 56. Their caches leave at 72 and 88, and the engine is held
    until then: the third prompt, there at 68, runs from 88 to 104. The first cache is sent until 104, the second until
    120, and the third, which may leave at 120, until 136. The fourth is sent and there at 330, but its decode engine
    hears of it at 325 + 4 + 8.
    """
    frontend = {"route": 8 * TICK, "deliver": 2 * TICK, "hand_over": 16 * TICK}
    system = {"layout": "disaggregated", "link": LINK, "frontend": frontend}
    rows = [(0, 32, 3), (0, 16, 2), (60, 16, 2), (300, 1, 2), (400, 16, 1)]
    result = play(rows, system=system, fast_forward=fast)
    table = requests(result)
    assert table["queued"] == [8, 8, 88, 308, 408]
    assert table["first_token"] == [58, 58, 106, 311, 426]
    assert table["last_token"] == [108 + 2 + 2, 124 + 1 + 2, 140 + 1 + 2, 337 + 1 + 2, 426]
    itl = summarise(result, MeasureSpec())["itl"]
    assert itl["mean"] == pytest.approx((53 + 1 + 69 + 37 + 29) / 5 * TICK)
    single = play(rows, system={"layout": "disaggregated", "link": LINK}, fast_forward=fast)
    assert result.population > single.population


def test_a_shared_link_and_links_apart() -> None:
    """Two prefill engines are ready at 32 and 16. Apart, both caches go at once; on one link the longer one, ready at
    32, finds the other gone.
    """
    rows = [(0, 32, 2), (0, 16, 2), (8, 8, 2)]
    system = {"layout": "disaggregated", "prefill_replicas": 2, "routing": "round_robin", "link": LINK}
    apart = link_summaries(play(rows, system=system))
    assert [(row["name"], row["bytes"]) for row in apart] == [("prefill-0", 40_000.0), ("prefill-1", 16_000.0)]
    # Request 2 follows request 0 on the first engine: ready at 40, its cache waits for the link until 64.
    assert [row["mean_wait"] / TICK for row in apart] == [12, 0]
    (shared,) = link_summaries(play(rows, system={**system, "link": {**LINK, "shared": True}}))
    assert (shared["name"], shared["bytes"], shared["mean_wait"] / TICK) == ("shared", 56_000.0, 8)


@both_modes
def test_prompts_that_begin_alike(fast: bool) -> None:
    """The second prompt finds the first two of its three blocks, and computes 16 tokens of 48."""
    rows = [(0, 40, 2), (100, 48, 2), (200, 48, 2)]
    result = play(rows, prefixes=((1, 2), (1, 2, 3), (1, 2, 3)), fast_forward=fast)
    table = requests(result)
    # The third finds all three, of which the last token is computed anew: two blocks count.
    assert table["cached_tokens"] == [0, 32, 32]
    assert [last - first for first, last in zip(table["arrival"], table["first_token"], strict=True)] == [40, 16, 16]
    summary = summarise(result, MeasureSpec())
    assert (summary["cached_tokens"], summary["prefill_tokens"]) == (64, 40 + 16 + 16)


@both_modes
def test_a_sequence_that_loses_its_blocks(fast: bool) -> None:
    """Four blocks. Both prompts fill two and one, and the first takes the last for its 33rd token, at 48. The second
    needs one for its 17th token then, so it is preempted at once. It comes back when the first has ended.
    """
    result = play(
        [(0, 32, 12), (0, 16, 3)], engine={"num_gpu_blocks": 4, "enable_prefix_caching": False}, fast_forward=fast
    )
    table = requests(result)
    assert (table["scheduled"], table["first_token"]) == ([0, 0], [48, 48])
    # The first decodes alone until 48 + 11; then the second computes its prompt and its first token again.
    assert table["last_token"] == [59, 59 + 17 + 1]
    assert (table["preemptions"], table["output_tokens"]) == ([0, 1], [12, 3])
    assert shares(result) == pytest.approx((77, 59 + 48 + 18, (2 * 48 + 3 * 11) + (48 + 2 * 18)))
    summary = summarise(result, MeasureSpec())
    assert (summary["preemptions"], summary["prefill_tokens"]) == (1, 48 + 17)
    assert summary["itl"]["mean"] == pytest.approx((11 + (76 - 48) + 1) / 13 * TICK)


@both_modes
def test_clients_that_think(fast: bool) -> None:
    """One client: a prompt of 32 and four decodes, 36 ticks, then it thinks for 28."""
    document = scenario(
        workload={
            "requests": 3,
            "prefill": {"distribution": "fixed", "mean": 32},
            "decode": {"distribution": "fixed", "mean": 5},
            "arrivals": {"process": "closed_loop", "concurrency": 1, "think": 28 * TICK},
        },
        step_time=STEP,
        fast_forward=fast,
    )
    table = requests(run(document))
    assert (table["arrival"], table["last_token"]) == ([0, 64, 128], [36, 100, 164])


def test_models_have_engines_of_their_own() -> None:
    """Two models with an engine each; the columns name both."""
    models = ModelMix(["model-0", "model-1"], [0, 1])
    result = play([(0, 32, 2), (0, 16, 2)], models=models, workload={"models": {"count": 2}})
    table = requests(result)
    assert set(table["model"]) == {"model-1"}
    assert set(table["replica"]) == {"model-1/engine-0"}
    assert [entry["name"] for entry in engine_summaries(result)] == ["model-0/engine-0", "model-1/engine-0"]
    assert [entry["steps"] for entry in engine_summaries(result)] == [0, 2]


@both_modes
def test_answers_shorter_than_their_limit(fast: bool) -> None:
    """Clients set a limit of 50, which no scheduler sees past; answers are their own lengths, and cut at 50."""
    result = play([(0, 16, 7), (0, 16, 60), (0, 16, 3)], max_tokens=50, fast_forward=fast)
    table = requests(result)
    assert table["output_tokens"] == [7, 50, 3]
    # Steps of three decodes until 48 + 2 · 3, of two until 54 + 4 · 2, and alone from then on.
    assert table["last_token"] == [62, 62 + 43, 54]
    assert shares(result)[:2] == pytest.approx((105, 62 + 105 + 54))


ASYNCHRONOUS = {"async_scheduling": True}


@both_modes
def test_a_step_ahead(fast: bool) -> None:
    """At 0 the prompt of request 0 and its first decode, 32 - 33, are scheduled. Request 1 comes at 16 and is seen at
    32: 63 of its tokens run beside the last decode until 97. At 33 its last prompt token is scheduled, for 97 - 98.
    """
    result = play([(0, 32, 3), (16, 64, 2)], engine=ASYNCHRONOUS, fast_forward=fast)
    table = requests(result)
    assert (table["queued"], table["scheduled"]) == ([0, 32], [0, 32])
    assert (table["first_token"], table["last_token"]) == ([32, 98], [97, 99])
    summary = summarise(result, MeasureSpec())
    assert (summary["steps"], summary["busy"]) == (5, pytest.approx(1))
    assert summary["itl"]["mean"] == pytest.approx((1 + 64 + 1) / 3 * TICK)


@both_modes
def test_a_step_ahead_of_an_answer_that_has_ended(fast: bool) -> None:
    """The third token comes at 18, when the step until 19 has begun: its token is thrown away."""
    result = play([(0, 16, 3)], max_tokens=50, engine=ASYNCHRONOUS, fast_forward=fast)
    table = requests(result)
    assert (table["last_token"], table["output_tokens"], result.end) == ([18], [3], 19 * TICK)
    assert shares(result)[0] == pytest.approx(19)


@both_modes
def test_a_decode_engine_that_is_down_when_a_cache_arrives(fast: bool) -> None:
    """The cache is there at 68 and the engine at 200, by when it is lost: it computes 33 tokens, and then one."""
    failures = [{"engine": "decode-0", "at": 50 * TICK, "duration": 150 * TICK}]
    system = {"layout": "disaggregated", "link": LINK}
    table = requests(play([(0, 32, 3)], system=system, failures=failures, fast_forward=fast))
    assert (table["first_token"], table["last_token"]) == ([32], [234])
    assert (table["output_tokens"], table["attempts"], table["replica"]) == ([3], [0], ["decode-0"])


@both_modes
def test_a_decode_engine_that_fails_under_an_answer(fast: bool) -> None:
    """Tokens come at 16 and, the cache being there at 36, at 37 to 40. At 50.5 the prompt and these five are computed,
    until 71.5, and four follow.
    """
    failures = [{"engine": "decode-0", "at": 40.5 * TICK, "duration": 10 * TICK}]
    system = {"layout": "disaggregated", "link": LINK}
    result = play([(0, 16, 10)], system=system, failures=failures, fast_forward=fast)
    table = requests(result)
    assert (table["first_token"], table["last_token"]) == ([16], [75.5])
    assert (table["output_tokens"], table["attempts"]) == ([10], [1])
    assert [entry["busy"] * 75.5 for entry in engine_summaries(result)] == pytest.approx([16, 4 + 25])
    assert [entry["prefill_tokens"] for entry in engine_summaries(result)] == [16, 21]


def test_requests_that_are_counted_wrong_are_seen_by_littles_law() -> None:
    result = play([(0, 32, 3), (16, 64, 2)])
    assert result.population == pytest.approx((98 + 83) * TICK)
    assert summarise(result, MeasureSpec())["littles_law_error"] == pytest.approx(0, abs=1e-12)
    wrong = replace(result, population=result.population * 0.75)
    assert summarise(wrong, MeasureSpec())["littles_law_error"] == pytest.approx(0.25)


def test_garbage_is_collected_again_after_a_run() -> None:
    assert gc.isenabled()
    play([(0, 1, 1)])
    assert gc.isenabled()
    gc.disable()
    try:
        play([(0, 1, 1)])
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("layout", ["colocated", "disaggregated"])
def test_work_between_steps_at_any_speed(layout: str) -> None:
    """Random requests to several engines: the same records with and without fast-forwarding and foresight."""
    link = {"bandwidth": 1e6, "latency": 0.001, "bytes_per_token": 100.0}
    engines = {"replicas": 3} if layout == "colocated" else {"prefill_replicas": 2, "decode_replicas": 3, "link": link}
    frontend = {"route": 0.0021, "deliver": 0.0007, "hand_over": 0.0033}
    systems = [{"layout": layout, **engines, "frontend": section} for section in (frontend, {})]
    result = [records(run(scenario(system=system, fast_forward=fast))) for system in systems for fast in (True, False)]
    assert result[0] == result[1]
    assert result[2] == result[3]
    first, later = (min(row["first_token"]) for row in (result[2], result[0]))
    assert later == pytest.approx(first + 0.0021 + 0.0007)


def early(**fields: float) -> dict[str, object]:
    """Prefill and decode apart, with caches that leave with chunks; fields of the link in ticks a token and ticks."""
    link = {**LINK, "latency": fields.pop("latency", 0.0) * TICK, "transfer": "with_chunks"}
    link["bandwidth"] = LINK["bandwidth"] / fields.pop("per_token", 1.0)
    return {"layout": "disaggregated", "link": link, **fields}


@both_modes
@pytest.mark.parametrize("per_token", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("prompt", [64, 65, 200, 256])
def test_caches_that_leave_with_chunks_are_a_pipeline_of_two_stages(fast: bool, prompt: int, per_token: float) -> None:
    """Chunks of 64 tokens: chunk k has been sent at max(its computation's end, the end of chunk k-1) + its transfer."""
    result = play([(0, prompt, 4)], system=early(per_token=per_token), fast_forward=fast)
    sent_until, computed = 0.0, 0
    while computed < prompt:
        chunk = min(64, prompt - computed)
        computed += chunk
        sent_until = max(computed, sent_until) + chunk * per_token
    table = requests(result)
    assert (table["first_token"], table["last_token"]) == ([prompt], [sent_until + 3])
    (link,) = result.links.values()
    assert link.moved == prompt * LINK["bytes_per_token"]


@both_modes
def test_messages_take_their_latency_before_a_cache_may_leave(fast: bool) -> None:
    """With a latency of 10, the answer is back at 40, and the first chunk leaves at its end, at 64. With 20, it is back
    at 80: two chunks leave at 128. The prompt is complete at 192, and its cache there 64 ticks and a latency later.
    """
    for latency, moved_before in ((10.0, 64), (20.0, 0), (40.0, 0)):
        rows = [(0, 192, 2)]
        result = play(rows, system=early(latency=latency, per_token=0.5), fast_forward=fast)
        left_last = 192 + 32 if 4 * latency <= 128 else 192 + 96
        assert requests(result)["last_token"] == [left_last + latency + 1], moved_before


@both_modes
def test_without_blocks_a_cache_leaves_when_its_prompt_is_complete(fast: bool) -> None:
    """Prompts of five and eight blocks. With 40, the second cache leaves in two halves of 64 ticks, the latter at 208;
    at 272 a step of the first answer has just begun, and the next has both. With 12, its chunks find seven blocks at 80
    and it leaves at 208 in one piece of 128 ticks. The first leaves from 64 to 128 and 144, and then decodes.
    """
    engine = {"num_gpu_blocks": 12}
    result = play([(0, 80, 400), (80, 128, 2)], system=early(), engine={"num_gpu_blocks": 40}, fast_forward=fast)
    assert requests(result)["last_token"][1] == 80 + 128 + 64 + 1 + 2
    small = {"pools": [
        {"name": "p", "role": "prefill"}, {"name": "d", "role": "decode", "engine": engine},
    ], "link": early()["link"]}  # fmt: skip
    result = play([(0, 80, 10), (80, 128, 2)], system=small, fast_forward=fast)
    assert requests(result)["last_token"] == [144 + 9, 80 + 128 + 128 + 1]


@both_modes
@pytest.mark.parametrize("engine", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("at", [70, 100, 130, 200, 230, 280])
def test_outages_in_the_middle_of_partial_transfers_leak_nothing(engine: str, at: int, fast: bool) -> None:
    """A prompt of 192 tokens and its cache take from 0 to 320 at three halves of a tick; every other one goes on."""
    failures = [{"engine": engine, "at": (at + 0.5) * TICK, "duration": 20 * TICK}]
    system = early(per_token=1.5, prefill_replicas=2, decode_replicas=2, routing="round_robin")
    rows = [(0, 192, 20), (10, 128, 30), (200, 192, 5), (400, 192, 5)]
    result = play(rows, system=system, failures=failures, fast_forward=fast)
    table = requests(result)
    assert table["output_tokens"] == [20, 30, 5, 5]
    for row in result.engines:
        row.core.check_integrity()
        assert row.free_blocks == row.blocks
        assert not row.core.reserved
