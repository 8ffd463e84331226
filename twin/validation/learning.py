"""What the twin learns of an engine before it predicts: the time of steps of every kind, at the machine's usual pace.

A shared machine does not hold still: its speed drifts by tens of per cent within seconds. So yardsticks are timed all
the while, here and when the workload is played. Steps are learnt as they would be were the yardsticks always at their
medians, and predicted at the pace that there is when they run. The workload itself teaches nothing.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.engine_steps import EngineSteps, Step
from latency_models.yardsticks import Reading
from schedulers.engine_config import EngineConfig
from twin.scenarios.validation import ValidationScenario
from twin.serving.pace import Pace
from twin.validation.plant import Plant
from twin.validation.takes import write_probed

PROBE_SEED = 1
HELD_OUT = 5
"""Every so manieth round of probing teaches nothing: it says how good the fit is."""


def learn(
    plant: Plant,
    scenario: ValidationScenario,
    config: EngineConfig,
    commit: object,
    folder: Path,
    advance: Callable[[str], None],
) -> dict[str, Any]:
    """Probe, fit, and say what was learnt: a document `twin.engine-steps/1`. What was timed is kept in the folder.

    Raises:
        ValueError: sizes that the engine refuses.
        OSError: the disk does not take it.
    """
    spec = scenario.probe
    probed = plant.probe(
        config, rounds=spec.rounds, steps=spec.steps, prompt=spec.prompt, answer=spec.answer, seed=PROBE_SEED,
        advance=advance,
    )  # fmt: skip
    write_probed(folder, probed)
    yardsticks = usual(probed.readings)
    rounds = at_pace(probed.rounds, Pace.of(probed.readings, yardsticks))
    taught = [step for i, steps in enumerate(rounds) if i % HELD_OUT for step in steps]
    held_out = [step for i, steps in enumerate(rounds) if not i % HELD_OUT for step in steps]
    model = EngineSteps(config.block_tokens).fit(taught)
    told = plant.describe()
    return model.document(
        errors=model.errors(held_out),
        repeat_spread=repeat_spread(rounds),
        yardsticks=yardsticks,
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


def usual(readings: Sequence[Reading]) -> dict[int, float]:
    """What each yardstick takes in the median, seconds, by its rows."""
    sizes = sorted({rows for _, rows, _ in readings})
    return {size: float(np.median([seconds for _, rows, seconds in readings if rows == size])) for size in sizes}


def at_pace(rounds: Sequence[Sequence[tuple[float, Step]]], pace: Pace) -> list[list[Step]]:
    """What the steps would have taken at the reference: each over the pace that there was meanwhile."""

    def steady(begin: float, step: Step) -> Step:
        return replace(step, seconds=step.seconds / pace.of_rows(step.rows).over(begin, step.seconds))

    return [[steady(begin, step) for begin, step in each] for each in rounds]


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
