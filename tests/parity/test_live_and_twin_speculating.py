"""A live engine that speculates, and its simulation with the recorded step times: the same batches with the same
drafts, and the same tokens accepted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the live engine needs the extra [live]")

from live.models.decoder import Decoder  # noqa: E402
from live.models.weights import random_weights  # noqa: E402
from live.speculation import SpeculativeEngine  # noqa: E402
from live.validation.backend import drafts_of, materialise, measure_drafts, replay  # noqa: E402  # noqa: E402
from scenarios.engine import EngineSpec, SchedulerPlan  # noqa: E402
from scenarios.steps import SpeculativeSpec  # noqa: E402
from schedulers.speculation import AnswerDrafts, SpeculativeEngineCore  # noqa: E402
from tests.parity.live_and_twin import (  # noqa: E402
    BLOCK,
    CONFIG,
    Recorded,
    answered,
    durations_and_arrivals,
    noted,
    simulate,
)
from twin.serving.engine.draft_outcomes import DraftOutcomes  # noqa: E402
from twin.serving.engine.speculation import Acceptance, SimulatedSpeculation  # noqa: E402
from workloads.request import Request  # noqa: E402

VOCABULARY = 12
PLACES = 4001
SPEC = SpeculativeSpec(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)


def own_answers(outcomes: list[AnswerDrafts], seed: int) -> DraftOutcomes:
    """Outcomes of which each request draws those of its own answer."""
    draws = SimulatedSpeculation(Acceptance(()), SPEC.num_speculative_tokens, seed)
    places = [draws.key(number) % PLACES for number in range(len(outcomes))]
    assert len(set(places)) == len(places)
    answers = [AnswerDrafts([0], [0])] * PLACES
    for place, outcome in zip(places, outcomes, strict=True):
        answers[place] = outcome
    return DraftOutcomes(answers)


def planned(blocks: int) -> SchedulerPlan:
    spec = EngineSpec(
        num_gpu_blocks=blocks, block_size=BLOCK, max_num_seqs=6, max_num_batched_tokens=40, speculative_config=SPEC
    )
    return spec.build(Path())


def engine_of(scheduler: SchedulerPlan) -> SpeculativeEngine:
    config = replace(CONFIG, shape=replace(CONFIG.shape, vocabulary=VOCABULARY))
    decoder = Decoder(config, random_weights(config, torch.float32, "cpu"))
    return SpeculativeEngine(
        decoder, scheduler.config, scheduler.make_core, SPEC.prompt_lookup_min, SPEC.prompt_lookup_max
    )  # fmt: skip


def requests(more: int = 0) -> list[tuple[Request, int]]:
    """Twenty within 20 ms; `more`: tokens that every answer is longer."""
    lengths = [(3 + 7 * i % 40, 2 + 11 * i % 45 + more) for i in range(20)]
    return [(Request(i, 0.001 * i, prompt, answer), answer) for i, (prompt, answer) in enumerate(lengths)]


@pytest.mark.parametrize("blocks", [400, 45])
def test_the_twin_schedules_what_the_live_engine_verified(blocks: int) -> None:
    scheduler = planned(blocks)
    longer = [materialise(*request, VOCABULARY, BLOCK) for request in requests(SPEC.num_speculative_tokens)]
    outcomes = own_answers(measure_drafts(engine_of(scheduler), longer, SPEC), seed=0)
    engine = engine_of(scheduler)
    stats, lived = engine.core.stats, noted(engine)
    generations = [materialise(*request, VOCABULARY, BLOCK) for request in requests()]
    replayed = replay(engine, generations)
    generations.sort(key=lambda generation: generation.request.arrival)
    durations, arrivals = durations_and_arrivals(replayed)

    speculation = SimulatedSpeculation(Acceptance((), measured=outcomes), SPEC.num_speculative_tokens, seed=0)
    records = list(map(answered, generations))
    twin, simulated = simulate(
        scheduler.make_core, Recorded(iter(durations)), zip(arrivals, records, strict=True), speculation=speculation
    )
    assert simulated == lived
    assert speculation.stats.counters() == stats.counters()
    assert speculation.stats.num_accepted_tokens > 50
    assert speculation.stats.num_draft_tokens > speculation.stats.num_accepted_tokens
    assert [record.output_tokens for record in records] == [len(generation.output) for generation in generations]
    core = twin.cores[0]
    assert isinstance(core, SpeculativeEngineCore)
    assert (core.preemptions > 0) is (blocks == 45)


def test_outcomes_are_those_of_the_engine_at_the_positions_that_it_decodes() -> None:
    """With one request alone: the drafts that the engine verified, step by step."""
    scheduler = planned(400)
    generation = materialise(Request(0, 0.0, 9, 60), 60, VOCABULARY, BLOCK)
    engine = engine_of(scheduler)
    stats = replay(engine, [generation]).speculation
    assert stats is engine.core.stats
    outcomes = drafts_of(generation, SPEC)
    assert len(outcomes.drafted) == 1 + 60 - SPEC.num_speculative_tokens
    position, drafts, accepted = 1, 0, 0
    while position < len(outcomes.drafted):
        drafts += outcomes.drafted[position] > 0
        accepted += outcomes.right[position]
        position += outcomes.right[position] + 1
    last = SPEC.num_speculative_tokens  # steps of the last tokens have no outcomes, since the answer ends
    assert 0 <= stats.num_drafts - drafts <= last
    assert 0 <= stats.num_accepted_tokens - accepted <= last
    assert accepted > 5
