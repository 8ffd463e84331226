"""What the twin learns of an engine before it predicts: the time of steps of every kind, and the machine's pace.

A shared machine does not hold still: its speed drifts by tens of per cent within minutes. So a few rounds of probing,
the same each time, are run before and after everything that is played; what they took, over what the model learnt, is
the pace of what lies between. The workload itself teaches nothing.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from latency_models.engine_steps import EngineSteps, Step
from schedulers.engine_config import EngineConfig
from twin.scenarios.validation import ValidationScenario
from twin.validation.plant import Plant

PROBE_SEED, PACE_SEED = 1, 2
HELD_OUT = 5
"""Every so manieth round of probing teaches nothing: it says how good the fit is."""


def learn(
    plant: Plant,
    scenario: ValidationScenario,
    config: EngineConfig,
    commit: object,
    advance: Callable[[str], None],
) -> dict[str, Any]:
    """Probe, fit, and put it down: a document `twin.engine-steps/1`.

    Raises:
        ValueError: sizes that the engine refuses.
    """
    spec = scenario.probe
    rounds = plant.probe(
        config, rounds=spec.rounds, steps=spec.steps, prompt=spec.prompt, answer=spec.answer, seed=PROBE_SEED,
        advance=advance,
    )  # fmt: skip
    taught = [step for i, steps in enumerate(rounds) if i % HELD_OUT for step in steps]
    held_out = [step for i, steps in enumerate(rounds) if not i % HELD_OUT for step in steps]
    model = EngineSteps(config.block_tokens).fit(taught)
    told = plant.describe()
    return model.document(
        errors=model.errors(held_out),
        repeat_spread=repeat_spread(rounds),
        provenance={
            "method": "measured",
            "source": f"{sum(map(len, rounds))} timed steps of the live engine in {spec.rounds} rounds",
            "device": told["device"],
            "model": scenario.model.path,
            "date": datetime.date.today().isoformat(),
            "commit": commit,
            "versions": told["versions"],
            "note": f"{told['dtype']}; every {HELD_OUT}th round held out",
        },
    )


def measure_pace(plant: Plant, scenario: ValidationScenario, config: EngineConfig, model: EngineSteps) -> float:
    """Seconds that a few rounds take now over those that `model` says; 1 where the scenario wants no such rounds."""
    spec = scenario.probe
    if not spec.pace_rounds:
        return 1.0
    rounds = plant.probe(
        config, rounds=spec.pace_rounds, steps=spec.steps, prompt=spec.prompt, answer=spec.answer, seed=PACE_SEED,
        advance=lambda text: None,
    )  # fmt: skip
    steps = [step for each in rounds for step in each]
    return sum(step.seconds for step in steps) / float(model.predict(steps).sum())


def repeat_spread(rounds: Sequence[Sequence[Step]]) -> float:
    """Relative deviation between decode steps that follow on each other and are alike in all that is described."""
    ratios = [
        math.log(after.seconds / before.seconds)
        for steps in rounds
        for before, after in itertools.pairwise(steps)
        if _alike(before, after)
    ]
    if len(ratios) < 2:
        return 0.0
    low, high = np.quantile(ratios, [0.25, 0.75])
    return float((high - low) / 1.349 / math.sqrt(2))


def _alike(one: Step, other: Step) -> bool:
    return not one.chunks and (one.rows, one.decode_attention, one.chunks, one.decodes) == (
        other.rows, other.decode_attention, other.chunks, other.decodes,
    )  # fmt: skip
