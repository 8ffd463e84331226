"""Outcomes of drafts at every position of an answer, found from its text: what is drafted, and how much is right."""

from __future__ import annotations

from collections.abc import Sequence

from live.engine import Engine
from live.generation import Generation
from live.speculation import NgramLookup, num_right
from scenarios.steps import SpeculativeSpec
from schedulers.speculation import AnswerDrafts


def measure_drafts(engine: Engine, generations: Sequence[Generation], spec: SpeculativeSpec) -> list[AnswerDrafts]:
    """Answer all generations, and find the outcomes of n-gram drafts at every position of each answer.

    Raises:
        ValueError: a request that the engine refuses.
    """
    for generation in generations:
        engine.submit(generation)
    while engine.step() is not None:
        pass
    return [drafts_of(generation, spec) for generation in generations]


def drafts_of(generation: Generation, spec: SpeculativeSpec) -> AnswerDrafts:
    """The outcomes at each position, from 1 output token on, behind which the answer is as long as a draft can be.

    Position 0, at which nothing is decoded, has no draft. An answer that is too short for any other has that one alone.
    """
    most = spec.num_speculative_tokens
    lookup = NgramLookup(spec.prompt_lookup_min, spec.prompt_lookup_max)
    lookup.extend(generation.prompt.tolist())
    output, drafted, right = generation.output, [0], [0]
    for position in range(1, len(output) - most + 1):
        lookup.extend(output[position - 1 : position])
        draft = lookup.propose(most)
        drafted.append(len(draft))
        right.append(num_right(draft, output[position : position + len(draft)]))
    return AnswerDrafts(drafted, right)
