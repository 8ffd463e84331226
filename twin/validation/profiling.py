"""Profiles an engine, fits a step-time model to its steps, and measures the contention of the machine meanwhile.

Profiling sends requests of random lengths; the workload that is to be predicted is not used.

Contention is waits for a processor, involuntary switches, and the time of equal work. A program that computes on the
same processors makes steps slower, and it does so by other amounts during the profile and during the replays. An error
of the forecast then says nothing about the twin.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from latency_models.fitting.estimator import CannotFit, Floats, deviation_between
from latency_models.io.config_io import write_yaml
from latency_models.sources.engine_regression import EngineRegression, Step
from latency_models.timed_runs import ProfiledRounds
from reports.run_directory import RunDirectory
from scenarios.system import DisaggregatedSpec
from scenarios.validation import ClockName, ValidationScenario
from twin.serving.engine.draft_outcomes import DraftOutcomes, document
from twin.serving.plan.plan import ServingPlan
from twin.serving.run.simulation import realisation
from twin.sweeps.serving_sweep import prepare
from twin.validation.backend import Backend, description, read_rounds, write_rounds

Document = dict[str, Any]
Verdict = Literal["met", "missed", "undecided"]

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Linux: nanoseconds on a processor, nanoseconds in the run queue, and turns, of the thread that reads it."""

PACKAGES = Path("/sys/class/powercap")
"""Linux: `intel-rapl:N/energy_uj` is the energy of processor package N so far, microjoules; AMD's have it, too."""

WAITED, SWITCHES, EQUAL_WORK = 0.02, 20.0, 0.05
"""Limits: the share of its time that the thread waits in the run queue, involuntary switches a second of CPU time, and
the spread of the CPU time of equal work. A thread with a processor of its own waits for per mille, and is interrupted a
few times a second. A spread of 5 % is that of the median step's goal."""

PIECES, SIZE = 20, 50_000
"""Pieces of equal work before and after each measured part, and the numbers that each sorts: some milliseconds."""


@contextlib.contextmanager
def contention_meter() -> Iterator[Document]:
    """Measures contention on the thread of the block; then the document has its seconds and counts."""
    numbers, result = np.random.default_rng(0).random(SIZE), Document()
    pieces, before = _equal_work(numbers), _counters()
    yield result
    result |= {name: after - before[name] for name, after in _counters().items() if name in before}
    result["equal_work_seconds"] = float(np.median(pieces + _equal_work(numbers)))


def _equal_work(numbers: Floats) -> list[float]:
    """CPU seconds of pieces of equal work."""
    seconds = []
    for _ in range(PIECES):
        begin = time.thread_time()
        np.sort(numbers)
        seconds.append(time.thread_time() - begin)
    return seconds


def _counters() -> dict[str, float]:
    """Seconds and counts of this process so far, and the packages' energy; without what the system does not tell."""
    counters = {
        "cpu_seconds": time.process_time(),
        "wall_seconds": time.perf_counter(),
        "involuntary_switches": float(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw),
    }
    with contextlib.suppress(OSError, ValueError, IndexError):
        counters["waited_seconds"] = float(SCHEDSTAT.read_text().split()[1]) / 1e9
    with contextlib.suppress(OSError, ValueError):
        if packages := [path for path in PACKAGES.glob("intel-rapl:*") if path.name.count(":") == 1]:
            counters["package_joules"] = sum(int((path / "energy_uj").read_text()) for path in packages) / 1e6
    return counters


def contention(points: Iterable[Mapping[str, Any]]) -> Document:
    """The contention of all measured points together, reasons to call the machine contended, and replays' joules."""
    points = [point for point in points if "contention" in point]
    parts = [point["contention"] for point in points]
    cpu, wall, switches = (
        sum(part[name] for part in parts) for name in ("cpu_seconds", "wall_seconds", "involuntary_switches")
    )
    waits = [part["waited_seconds"] for part in parts if "waited_seconds" in part]
    work = [part["equal_work_seconds"] for part in parts]
    joules = [point["contention"].get("package_joules", -1.0) for point in points if "requests" in point]
    share = sum(waits) / max(cpu + sum(waits), 1e-9) if waits else None
    rate, spread = switches / max(cpu, 1e-9), max(work) / max(min(work), 1e-9) - 1
    reasons = []
    if share is not None and share > WAITED:
        reasons.append(f"the engine waited for a processor {100 * share:.1f} % of its time (limit {100 * WAITED:g} %)")
    if rate > SWITCHES:
        reasons.append(f"it was interrupted {rate:.0f} times a second of CPU time (limit {SWITCHES:g})")
    if spread > EQUAL_WORK:
        reasons.append(f"CPU times of equal work differed by {100 * spread:.0f} % (limit {100 * EQUAL_WORK:g} %)")
    return {
        "parts": len(parts),
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "waited_share": share,
        "involuntary_switches_per_second": rate,
        "equal_work_spread": spread,
        "package_joules": sum(joules) if joules and min(joules) >= 0 else None,  # a counter may wrap
        "contended": bool(reasons),
        "reasons": reasons,
    }


def verdict(missed: list[str], contention: Document) -> Verdict:
    """`undecided` where goals were missed on a contended machine."""
    if not missed:
        return "met"
    return "undecided" if contention["contended"] else "missed"


PROFILING_SEED = 1
SPEED_PASSES = 5
"""Fits of the machine's speeds: further ones change a replay's time by less than 0.1 %."""

HELD_OUT_EVERY = 5
"""Every fifth profiling round is held out for evaluation."""


class StepModel:
    """A step-time model that is fitted to the engine's own steps, whose profile `run` keeps.

    `calibration`: the file of an earlier validation, in place of a profile.
    """

    def __init__(
        self, backend: Backend, scenario: ValidationScenario, base: Path, calibration: Path | None, run: RunDirectory,
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._backend = backend
        self._scenario = scenario
        self._base = base
        self._calibration = calibration
        self._run = run
        self._note = note
        self._parts: list[ProfiledRounds] = []
        self._in_turns: dict[str, ProfiledRounds] = {}

    def profile(self) -> None:
        """Profile the engine, unless there is a calibration, or the run folder has its profile."""
        name, spec = "part-1", self._scenario.profiling
        if self._calibration is not None:
            return
        part = self._kept("profiling-1", name)
        if part is None:
            self._note(f"profiling the engine: {spec.rounds} rounds")
            # A chunk policy may need the step times that the profile is for.
            scheduler = self._scenario.engine.model_copy(update={"chunking": None}).build(self._base)
            with contention_meter() as measured:
                part = self._backend.profile(scheduler, spec, PROFILING_SEED)
            self._keep("profiling-1", name, part, {"rounds": spec.rounds}, {"contention": measured})
        self._parts.append(part)

    def keep_in_turns(self, repeat: str, profiled: ProfiledRounds | None) -> None:
        """Keep what was profiled in turns with a repeat, or take it from the run folder; nothing if there is none."""
        if self._calibration is not None:
            return
        part = self._kept(f"profiling-{repeat}", repeat)
        if part is None and profiled is not None and any(profiled.rounds):
            part = profiled
            self._keep(f"profiling-{repeat}", repeat, part)
        if part is not None:
            self._in_turns[repeat] = part

    def _kept(self, point: str, name: str) -> ProfiledRounds | None:
        """A part of the profile that the run folder has."""
        entry = self._run.points().get(point)
        folder = self._run.path / "profiling" / name
        return None if entry is None else read_rounds(folder, entry.get("frontend", {}))

    def _keep(
        self, point: str, name: str, part: ProfiledRounds, before: Document | None = None, after: Document | None = None
    ) -> None:
        write_rounds(self._run.path / "profiling" / name, part.rounds)
        counts = {"steps": sum(map(len, part.rounds)), "frontend": dict(part.frontend)}
        self._run.add_point(point, {**(before or {}), **counts, **(after or {})})

    @property
    def profiled_in_turns(self) -> bool:
        """True if enough was profiled in turns with the repeats for a model of that alone."""
        return sum(len(part.rounds) for part in self._in_turns.values()) >= 2 * HELD_OUT_EVERY

    def speeds(self) -> dict[str, float]:
        """`machine_speeds` of the repeats with which one engine was profiled in turns; empty for several engines."""
        if isinstance(self._scenario.system, DisaggregatedSpec):
            return {}
        return machine_speeds(self._in_turns, self._scenario.attention_block)

    def fitted_file(self, name: str, *, in_turns: bool = False) -> Path:
        """Fit the model to the profile (or what was profiled in turns) into the run folder: `twin.engine-steps/2`."""
        if self._calibration is not None:
            return self._calibration
        backend = description(self._backend, self._run)
        speeds = self.speeds() if in_turns else {}
        repeats = [at_common_speed(part, speeds.get(repeat, 1.0)) for repeat, part in self._in_turns.items()]
        document = fitted_document(
            repeats if in_turns else self._parts,
            self._scenario.attention_block,
            self._scenario.clock or "wall",
            {
                "device": backend["device"],
                "model": self._scenario.model.path,
                "commit": self._run.manifest.get("commit"),
                "versions": backend["versions"],
                "note": f"{backend['dtype']}; every {HELD_OUT_EVERY}th round held out",
            },
        )
        self._run.write_text(name, write_yaml(document))
        return self._run.path / name


def fitted_document(
    parts: Sequence[ProfiledRounds], block_size: int, clock: ClockName, provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """The document `twin.engine-steps/2` of a model that is fitted to profiled steps."""
    rounds = [[step for _, step in steps] for part in parts for steps in part.rounds]
    training = [step for i, steps in enumerate(rounds) if i % HELD_OUT_EVERY for step in steps]
    held_out = [step for i, steps in enumerate(rounds) if not i % HELD_OUT_EVERY for step in steps]
    model = EngineRegression(block_size).fit(training)
    return model.document(
        errors=model.errors(held_out),
        repeat_spread=repeat_spread(rounds),
        round_spread=round_spread(rounds, block_size),
        clock=clock,
        frontend=mean_times([part.frontend for part in parts]),
        provenance={
            "method": "measured",
            "source": f"{sum(map(len, rounds))} timed steps of the live engine in {len(rounds)} rounds",
            "date": datetime.date.today().isoformat(),
            **provenance,
        },
    )


def machine_speeds(parts: Mapping[str, ProfiledRounds], block_size: int) -> dict[str, float]:
    """Factors of step times while each repeat ran: seconds of the steps profiled with it over those of a common fit.

    Fit and factors take turns, since a fit to several speeds takes them for properties of batches. Only the part by
    which repeats differ more than their rounds explain is believed (empirical Bayes).
    """
    speeds = dict.fromkeys(parts, 1.0)
    for _ in range(SPEED_PASSES):
        alike = [at_common_speed(part, speeds[name]) for name, part in parts.items()]
        model = EngineRegression(block_size).fit([step for part in alike for steps in part.rounds for _, step in steps])
        errors = {
            name: np.array([-np.log1p(model.errors([step for _, step in steps])).mean() for steps in part.rounds])
            for name, part in parts.items()
        }
        speeds = _believed_speeds(errors)
    return speeds


def _believed_speeds(errors: Mapping[str, Floats]) -> dict[str, float]:
    """Factors from the mean log errors of each repeat's rounds."""
    between = deviation_between(list(errors.values())) ** 2
    several = [error for error in errors.values() if len(error) > 1]
    within = float(np.mean([error.var(ddof=1) for error in several])) if several else 0.0
    shares = {name: between / (between + within / len(error)) if between else 0.0 for name, error in errors.items()}
    common = float(np.mean(np.concatenate(list(errors.values()))))
    return {name: math.exp(shares[name] * (error.mean() - common)) for name, error in errors.items()}


def at_common_speed(part: ProfiledRounds, speed: float) -> ProfiledRounds:
    """A part as if its steps, which took `speed` times as long as in the common fit, had taken as long."""
    rounds = [[(begin, replace(step, seconds=step.seconds / speed)) for begin, step in steps] for steps in part.rounds]
    return replace(part, rounds=rounds)


def mean_times(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of times by name over parts; empty without any."""
    return {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}


def round_spread(rounds: Sequence[Sequence[Step]], block_size: int) -> float:
    """Relative deviation between rounds: of the machine's speed, and of what the model does not know of a round.

    Each round is predicted by a fit to others, since a fit to few rounds follows the speed that each of them had.
    """
    errors = []
    for fold in range(HELD_OUT_EVERY):
        training = [step for i, steps in enumerate(rounds) if i % HELD_OUT_EVERY != fold for step in steps]
        with contextlib.suppress(CannotFit):  # a short profile may have too few steps without one of its rounds
            model = EngineRegression(block_size).fit(training)
            errors += [-np.log1p(model.errors(steps)) for steps in rounds[fold::HELD_OUT_EVERY]]
    return deviation_between(errors)


def repeat_spread(rounds: Sequence[Sequence[Step]]) -> float:
    """Relative deviation between successive decode steps with equal features, from quartiles of their log ratios."""
    ratios = [
        math.log(after.seconds / before.seconds)
        for steps in rounds
        for before, after in itertools.pairwise(steps)
        if _equal_decodes(before, after)
    ]
    if len(ratios) < 2:
        return 0.0
    low, high = np.quantile(ratios, [0.25, 0.75])
    return float((high - low) / 1.349 / math.sqrt(2))


def _equal_decodes(before: Step, after: Step) -> bool:
    """Whether two successive steps have the same decodes, each of which attends to at most one token more."""
    features = [(step.rows, step.chunks, step.decodes) for step in (before, after)]
    grown = after.decode_attention - before.decode_attention
    return not before.chunks and features[0] == features[1] and 0 <= grown <= before.decodes


FILE = "draft-outcomes.json"


def measured_drafts(
    backend: Backend, scenario: ValidationScenario, base: Path, run: RunDirectory, note: Callable[[str], None]
) -> Path:
    """Measure the outcomes of drafts in the longest answers, once a run folder: `twin.draft-outcomes/1`."""
    file, spec = run.path / FILE, scenario.engine.speculative_config
    assert spec is not None
    if "drafts" in run.points():
        return file
    plan = _workload(scenario, base)
    count = min(scenario.profiling.answers, plan.workload.recorded or scenario.profiling.answers)
    note(f"measuring drafts in {count} answers")
    answered = realisation(replace(plan, requests=count), scenario.repeats + 1)
    replayed = (answer for repeat in range(scenario.repeats) for _, answer in realisation(plan, repeat))
    longest = max(*replayed, *(answer for _, answer in answered))
    drafts = backend.measure_drafts(scenario.engine.build(base), [(request, longest) for request, _ in answered])
    outcomes = DraftOutcomes(list(drafts))
    settings = spec.model_dump(
        include={"method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}
    )  # fmt: skip
    source = f"{count} answers of the live engine to other requests than those that are replayed"
    run.write_json(FILE, document(outcomes, settings, source))
    proposed, by_position = outcomes.shares(spec.num_speculative_tokens)
    run.add_point("drafts", {"answers": count, "proposed": proposed, "acceptance_by_position": by_position})
    shares = ", ".join(f"{100 * share:.0f} %" for share in by_position)
    note(f"{100 * proposed:.0f} % of decodes have a draft; its tokens are right in {shares} of them, by position")
    return file


def _workload(scenario: ValidationScenario, base: Path) -> ServingPlan:
    """A plan with the scenario's workload, which does not speculate."""
    serving = scenario.serving_without_times()
    serving["engine"]["speculative_config"] = None
    return prepare(serving, base / "scenario").cases[0].plan
