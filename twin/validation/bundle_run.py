"""Validates a bundle: profiles its roles, runs it live at every ratio, predicts the same requests, compares.

Profiling runs a bundle of the same shape with requests of other lengths. It takes turns with the live run, for some
milliseconds each, so that both see the same machine speed. The prediction does not use measurements of the live run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.bundle_metrics import BundleMetrics, BundleTimes, bundle_metrics
from reports.records.run_directory import RunDirectory
from scenarios.validation import BundleValidationScenario
from schedulers.bundle_slots import REFILL_POLICIES
from twin.afd.bundle import Supply
from twin.afd.plan import mid_life
from twin.afd.role_bundle import MessageSizes, RoleBundle, RoleBundleConfig, RoleRecords, RoleWork
from twin.afd.role_times import Part, RecordedWork, RoleTimes, SampledWork, TimedStretch
from twin.validation.backend import BundleBackend
from twin.validation.bundle_compare import compare_ratios, theory_curves
from twin.validation.contention import ContentionMeter
from twin.validation.recordings import read_stretches, read_times, write_stretches, write_times
from twin.validation.run import blamed_on

SCHEMA = "twin.bundle-validation/1"
DRAWS = 16
"""Simulations of each live run, which begin at other places of the roles' scatter; their metrics are averaged."""

Note = Callable[[str], None]


@dataclass(frozen=True)
class BundleValidation:
    """A validation under way; `run` keeps each part as soon as it is over, and what it holds is not run again."""

    backend: BundleBackend
    scenario: BundleValidationScenario
    run: RunDirectory
    note: Note

    def document(self) -> dict[str, Any]:
        """Profile, run, predict and compare: the document `twin.bundle-validation/1`."""
        scenario = self.scenario
        ratios = [topology.attention_instances for topology in scenario.topologies]
        stretches: dict[Part, list[TimedStretch]] = {}
        live: dict[int, list[BundleTimes]] = {x: [] for x in ratios}
        for repeat in range(scenario.repeats):
            for x in ratios:
                stretches[Part(x, repeat)], times = self._measure(x, repeat)
                live[x].append(times)
        roles = RoleTimes(scenario.system.microbatches).fit(stretches)
        predicted = {x: [self._predict(roles, x, repeat) for repeat in range(scenario.repeats)] for x in ratios}
        theory = theory_curves(roles, scenario, self._config(1), ratios)
        return {
            "schema": SCHEMA,
            "name": scenario.name,
            "note": "Measured by direct execution of the live roles; predicted by simulating the same requests.",
            "clock": scenario.clock,
            "scenario": scenario.model_dump(mode="json", by_alias=True),
            "backend": self.backend.describe(),
            "calibration": roles.document(),
            **compare_ratios(
                {x: [bundle_metrics(run) for run in runs] for x, runs in live.items()},
                {x: [metrics for metrics, _ in runs] for x, runs in predicted.items()},
                theory,
            ),
            "timelines": {str(x): timeline(live[x][0], predicted[x][0][1]) for x in ratios},
        }

    def _measure(self, x: int, repeat: int) -> tuple[list[TimedStretch], BundleTimes]:
        """The stretches of a bundle with random requests, and the times of one with the workload's."""
        name = f"ratio-{x}-repeat-{repeat + 1}"
        profiling, live = (self.run.path / part / name for part in ("profiling", "live"))
        if name in self.run.points():
            return read_stretches(profiling), read_times(live)
        self.note(f"profiling and running {x}A-1F, repeat {repeat + 1} of {self.scenario.repeats}")
        supplies = workload_supply(self.scenario, x, repeat), profiling_supply(self.scenario, x, repeat)
        with blamed_on("workload"), ContentionMeter() as meter:
            measured, profiled = self.backend.run_in_turns(
                x, [(supply.prefill, supply.decode, supply.completions or 0) for supply in supplies]
            )
        recorded = RecordedWork(profiled.work)
        RoleBundle(self._config(x), replace(supplies[1], completions=len(profiled.times.ids)), recorded).run()
        write_stretches(profiling, recorded.timed)
        write_times(live, measured.times)
        counts = {"stretches": len(recorded.timed), "requests": len(measured.times.ids)}
        self.run.add_point(name, {**counts, "contention": meter.document})
        return recorded.timed, measured.times

    def _predict(self, times: RoleTimes, x: int, repeat: int) -> tuple[BundleMetrics, BundleTimes]:
        """The mean metrics of the simulated runs, and the times of the first."""
        supply, config = workload_supply(self.scenario, x, repeat), self._config(x)
        begins = [draw / DRAWS for draw in range(DRAWS)]
        runs = [simulated_times(config, supply, SampledWork(times, Part(x, repeat), begin)) for begin in begins]
        return mean_metrics([bundle_metrics(run) for run in runs]), runs[0]

    def _config(self, x: int) -> RoleBundleConfig:
        system = self.scenario.system
        return RoleBundleConfig(
            x, system.batch_size, self.backend.layers,
            MessageSizes(self.backend.row_bytes, system.block_size), system.block_size,
            system.microbatches, system.link.build(), REFILL_POLICIES.select(system.refill),
        )  # fmt: skip


def workload_supply(scenario: BundleValidationScenario, x: int, repeat: int) -> Supply:
    """The requests of a repeat: the bundle starts with ones of random ages, as in the steady state."""
    in_flight, completions = _in_flight(scenario, x), scenario.completions(x)
    rng, lengths = np.random.default_rng([scenario.seed, 3, x, repeat]), scenario.workload.lengths(None)
    prefill, decode = lengths.sample(rng, completions + in_flight)
    prefill[:in_flight], decode[:in_flight] = mid_life(lengths, rng, in_flight)
    return Supply(np.maximum(prefill, 1), decode, None, completions)


def profiling_supply(scenario: BundleValidationScenario, x: int, part: int) -> Supply:
    """Requests of lengths spread evenly in their logarithm, of twice the workload's tokens, to outlast the live run."""
    spec = scenario.profiling
    rng = np.random.default_rng([scenario.seed, 4, x, part])
    mean = spec.max_output_tokens / max(np.log(spec.max_output_tokens), 1.0)
    completions = int(2 * scenario.completions(x) * scenario.workload.lengths(None).mean_decode / mean) + 1
    count = completions + _in_flight(scenario, x)
    prefill, decode = (
        np.ceil(limit ** rng.random(count)).astype(np.int64)
        for limit in (spec.max_prompt_tokens, spec.max_output_tokens)
    )
    return Supply(prefill, decode, None, completions)


def _in_flight(scenario: BundleValidationScenario, x: int) -> int:
    return x * scenario.system.batch_size * scenario.system.microbatches


def simulated_times(config: RoleBundleConfig, supply: Supply, work: RoleWork) -> BundleTimes:
    records = RoleBundle(config, supply, work).run()
    ids = np.array(records.finished[: supply.completions], dtype=np.int64)
    ends, tokens = zip(*records.steps, strict=True)
    return BundleTimes(
        ids=ids,
        tokens=supply.decode[ids],
        first_token=np.array(records.first_token)[ids],
        finish=np.array(records.finish)[ids],
        step_ends=np.array(ends),
        step_tokens=np.array(tokens, dtype=np.int64),
        attention=_busy_and_elapsed(records, slice(1, -1)),
        ffn=_busy_and_elapsed(records, slice(-1, None)),
        attention_to_ffn=records.attention_to_ffn,
        ffn_to_attention=records.ffn_to_attention,
    )


def _busy_and_elapsed(records: RoleRecords, ranks: slice) -> NDArray[np.float64]:
    return np.array([(role.busy, role.now) for role in records.roles[ranks]])


def mean_metrics(runs: Sequence[BundleMetrics]) -> BundleMetrics:
    """The means over simulations of the same requests."""
    rows = [asdict(run) for run in runs]
    means: dict[str, Any] = {
        name: None if rows[0][name] is None else float(np.mean([row[name] for row in rows]))
        for name in rows[0]
        if name not in ("requests", "steps", "attention_to_ffn", "ffn_to_attention")
    }
    return replace(runs[0], **means)


POINTS = 120


def timeline(live: BundleTimes, twin: BundleTimes) -> dict[str, Any]:
    """Tokens of the steps that have ended, at each `time` in seconds."""
    times = np.linspace(0.0, float(max(live.step_ends[-1], twin.step_ends[-1])), POINTS)
    return {"time": times.tolist()} | {
        name: np.concatenate([[0], np.cumsum(run.step_tokens)])[
            np.searchsorted(run.step_ends, times, side="right")
        ].tolist()
        for name, run in (("live", live), ("twin", twin))
    }
