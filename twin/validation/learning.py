"""What the twin learns of an engine before it predicts: the time of steps of every kind, at the machine's usual pace.

A shared machine does not hold still: its speed drifts by tens of per cent within seconds. So yardsticks are timed all
the while, here and when the workload is played. Steps are learnt as they would be were the yardsticks always at their
medians, and predicted at the pace that there is when they run. What yardsticks do not tell drifts by a few per cent
within minutes, and therefore probing and playing take turns. The workload itself teaches nothing.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.engine_steps import EngineSteps, Step
from latency_models.strict import checked, write_yaml
from latency_models.yardsticks import Reading
from reports.records.run_directory import RunDirectory
from twin.scenarios.serving import EngineSpec
from twin.scenarios.validation import ValidationScenario
from twin.serving.pace import Pace
from twin.validation.plant import Plant
from twin.validation.takes import Probing

PROBE_SEED = 1
HELD_OUT = 5
"""Every so manieth round of probing teaches nothing: it says how good the fit is."""


class Learning:
    """Probing in parts, one before each repeat: what is learnt is of the same minutes as what is played.

    Args:
        run: keeps each part as soon as it has been probed; those that are in it are not probed again.

    Raises:
        BadInput: settings of the engine that it does not take.
    """

    def __init__(
        self, plant: Plant, scenario: ValidationScenario, run: RunDirectory, say: Callable[[str], None]
    ) -> None:
        self._plant, self._scenario, self._run, self._say = plant, scenario, run, say
        self._config = checked(EngineSpec, scenario.engine, None, "engine").build(run.path, None)
        self._shares = shares(scenario.probe.rounds, scenario.repeats)
        self._parts: list[Probing] = []

    def go_on(self) -> None:
        """Probe the next part, if there is one.

        Raises:
            ValueError: sizes that the engine refuses.
            OSError: the disk does not take it, or a part that was kept cannot be read.
        """
        part, spec = len(self._parts), self._scenario.probe
        if part == len(self._shares):
            return
        name = f"probe-{part + 1}"
        folder = self._run.path / "probe" / f"part-{part + 1}"
        if name in self._run.points():
            self._parts.append(Probing.read(folder))
            return
        rounds = self._shares[part]
        self._say(f"probing the engine, part {part + 1} of {len(self._shares)}: {rounds} rounds")
        probed = self._plant.probe(
            self._config, rounds=rounds, steps=spec.steps, prompt=spec.prompt, answer=spec.answer,
            seed=PROBE_SEED + part,
        )  # fmt: skip
        kept = Probing(probed.rounds, probed.readings)
        kept.write(folder)
        self._run.add_point(name, {"rounds": rounds, "steps": sum(map(len, kept.rounds))})
        self._parts.append(kept)

    def known(self, name: str) -> Path:
        """Fit what has been probed so far, and write it to a file of the run folder: `twin.engine-steps/2`.

        Raises:
            OSError: the disk does not take it.
        """
        told = self._plant.describe()
        document = learnt(
            self._parts,
            self._config.block_tokens,
            {
                "device": told["device"],
                "model": self._scenario.model.path,
                "commit": self._run.manifest.get("commit"),
                "versions": told["versions"],
                "note": f"{told['dtype']}; every {HELD_OUT}th round held out",
            },
        )
        self._run.write_text(name, write_yaml(document))
        return self._run.path / name


class Known:
    """In place of `Learning`: the steps of an earlier validation, to which nothing is added."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def go_on(self) -> None:
        """There is nothing to probe."""

    def known(self, name: str) -> Path:
        """The file, wherever it is."""
        return self._file


def shares(rounds: int, repeats: int) -> list[int]:
    """Rounds of each part: one part a repeat, as even as can be, but none without a round that is held out."""
    parts = min(repeats, rounds // HELD_OUT)
    return [len(range(part, rounds, parts)) for part in range(parts)]


def learnt(parts: Sequence[Probing], page_tokens: int, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The document `twin.engine-steps/2` of what was probed; `provenance`: what this adds to."""
    yardsticks = usual([reading for part in parts for reading in part.readings])
    rounds = [steps for part in parts for steps in at_pace(part.rounds, Pace.of(part.readings, yardsticks))]
    taught = [step for i, steps in enumerate(rounds) if i % HELD_OUT for step in steps]
    held_out = [step for i, steps in enumerate(rounds) if not i % HELD_OUT for step in steps]
    model = EngineSteps(page_tokens).fit(taught)
    return model.document(
        errors=model.errors(held_out),
        repeat_spread=repeat_spread(rounds),
        yardsticks=yardsticks,
        provenance={
            "method": "measured",
            "source": f"{sum(map(len, rounds))} timed steps of the live engine in {len(rounds)} rounds",
            "date": datetime.date.today().isoformat(),
            **provenance,
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
