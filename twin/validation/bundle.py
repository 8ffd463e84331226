"""Validates a bundle: profiles its roles, runs it live at every ratio, predicts the same requests, compares.

Profiling runs a bundle of the same shape with requests of other lengths. It takes turns with the live run, for some
milliseconds each, so that both see the same machine speed. The prediction does not use measurements of the live run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.stages import PassLatency
from reports.metrics import BundleMetrics, BundleTimes, bundle_metrics
from reports.run_directory import RunDirectory
from scenarios.validation import BundleValidationScenario
from schedulers.bundle_slots import REFILL_POLICIES
from twin.afd.bundle import Supply
from twin.afd.plan import mid_life
from twin.afd.role_bundle import TOKEN_BYTES, MessageSizes, RoleBundle, RoleBundleConfig, RoleRecords, RoleWork
from twin.afd.role_times import Part, RecordedWork, RoleTimes, SampledWork, TimedStretch
from twin.theory.cycle import CycleModel, load_phases
from twin.theory.paper import PaperModel
from twin.validation.backend import BundleBackend, read_stretches, read_times, write_stretches, write_times
from twin.validation.compare import error_entry
from twin.validation.profiling import contention_meter
from twin.validation.run import blamed_on
from workloads.pairs import LengthPairs

SEARCHED = 0.25, 64.0


def step_lines(times: RoleTimes, config: RoleBundleConfig, lengths: LengthPairs, largest: int) -> PassLatency:
    """Lines of a whole decode step; the coordinator's work is counted at `largest` attention instances."""
    batch, layers, link, mean = config.batch_size, config.layers, config.link, times.mean
    entering = batch / lengths.mean_decode
    stage = mean("attention.stage", (batch, 0))
    per_token = mean("attention.stage", (batch, padding(lengths, batch))) - stage
    edges = mean("attention.begin", (batch, 0, entering)) - stage + mean("attention.end", (batch, entering))
    command = mean("coordinator.collect", (batch,))
    command += mean("coordinator.decide", (batch * largest, entering * largest, entering * largest))
    command += (largest - 1) / 2 * (mean("coordinator.receive", (batch,)) + mean("coordinator.send", (entering,)))
    command += link.seconds(TOKEN_BYTES * batch) + link.seconds(0)
    attention = layers * (stage + mean("attention.wait", ())) + edges + command
    per_row = mean("ffn.stage", (1,)) - mean("ffn.stage", (0,))
    per_instance = mean("ffn.receive", (batch,)) + mean("ffn.send", (batch,))
    constant = max(mean("ffn.stage", (0,)) + mean("ffn.wait", ()) - per_instance, 0.0)
    row_seconds = config.sizes.row / link.bandwidth
    return PassLatency(
        attention=(layers * per_token, attention),
        ffn=(layers * (per_row + per_instance / batch), layers * constant),
        communication=(2 * layers * row_seconds, 2 * layers * link.latency),
    )


def padding(lengths: LengthPairs, batch_size: int) -> float:
    """The mean of the largest of B slots' loads over the mean load: attention on a CPU pads requests to the longest."""
    pmf = lengths.slot_load_pmf()
    largest = np.cumsum(pmf) ** batch_size
    return float((len(pmf) - 1 - largest[:-1].sum()) / lengths.renewal_load())


def theory_curves(
    times: RoleTimes, scenario: BundleValidationScenario, config: RoleBundleConfig, ratios: Sequence[int]
) -> dict[str, Any]:
    """Throughput per instance of both theories at each ratio, and their best ratios."""
    lengths, batch = scenario.workload.lengths(None), config.batch_size
    latency = step_lines(times, config, lengths, max(ratios))
    paper = PaperModel(latency, batch, lengths.mean_prefill, lengths.mean_decode)
    cycle = CycleModel(latency, batch, config.microbatches, load_phases(lengths, batch, in_step=False), "independent")
    return {
        "lines": {
            "attention": list(latency.attention),
            "ffn": list(latency.ffn),
            "communication": list(latency.communication),
        },
        "published": {"throughput": [paper.throughput(x) for x in ratios], "r_star": paper.r_star},
        "barrier": {"throughput": [cycle.throughput(x) for x in ratios], "r_star": cycle.best_ratio(*SEARCHED)},
    }


GOALS = {"throughput": 0.03, "tpot": 0.03, "idle_attention": 0.02, "idle_ffn": 0.02}
"""Limits of each ratio's |error|, averaged over repeats; `--tolerance` multiplies them."""

MEAN_GOALS = {"throughput": 0.015, "tpot": 0.015}
"""Limits of the mean |error| over all ratios."""

REGRET_GOAL = 0.01
"""Limit of the measured throughput that choosing the predicted ratio loses."""

DIFFERENCES = ("idle_attention", "idle_ffn")
"""Metrics that are shares: their errors are differences, not relative ones."""


def compare_ratios(
    measured: Mapping[int, Sequence[BundleMetrics]],
    predicted: Mapping[int, Sequence[BundleMetrics]],
    theory: Mapping[str, Any],
) -> dict[str, Any]:
    """Metrics and errors of each ratio, repeat by repeat, since both have the same requests, and the best ratios'
    regret.
    """
    ratios = list(measured)
    entries: list[dict[str, Any]] = [
        {
            "ratio": x,
            "topology": f"{x}A-1F",
            "requests": measured[x][0].requests,
            "metrics": _metrics([_values(run) for run in measured[x]], [_values(run) for run in predicted[x]]),
            "theory": {name: theory[name]["throughput"][i] for name in ("published", "barrier")},
        }
        for i, x in enumerate(ratios)
    ]
    curves = {
        side: {x: entry["metrics"]["throughput"][side] for x, entry in zip(ratios, entries, strict=True)}
        for side in ("measured", "predicted")
    } | {name: dict(zip(ratios, theory[name]["throughput"], strict=True)) for name in ("published", "barrier")}
    best = {name: max(curve, key=curve.__getitem__) for name, curve in curves.items()}
    highest = max(curves["measured"].values())
    regrets = {name: 1 - curves["measured"][x] / highest for name, x in best.items()}
    return {
        "ratios": entries,
        "errors": {
            name: {str(entry["ratio"]): entry["metrics"][name]["error"] for entry in entries}
            for name in entries[0]["metrics"]
        },
        "mean_absolute_errors": {
            name: float(np.mean([abs(entry["metrics"][name]["error"]) for entry in entries]))
            for name in entries[0]["metrics"]
        },
        "best_ratio": best,
        "regret": regrets["predicted"],
        "regrets": regrets,
        "theory": dict(theory),
    }


def _values(run: BundleMetrics) -> dict[str, float | None]:
    """The metrics by name. Throughput counts all tokens, since slots are full; transfers are means."""
    to_ffn, to_attention = run.attention_to_ffn, run.ffn_to_attention
    return {
        "throughput": run.throughput_full,
        "throughput_eq_21": run.throughput,
        "tpot": run.tpot_gaps,
        "tpot_eq_22": run.tpot,
        "idle_attention": run.idle_attention,
        "idle_ffn": run.idle_ffn,
        "transfer_attention_to_ffn": to_ffn.seconds / to_ffn.messages,
        "transfer_ffn_to_attention": to_attention.seconds / to_attention.messages,
    }


def _metrics(
    measured: Sequence[Mapping[str, float | None]], predicted: Sequence[Mapping[str, float | None]]
) -> dict[str, Any]:
    """Mean, error and goal of each metric over the repeats."""
    entries = {}
    for name in measured[0]:
        if any(run[name] is None for run in (*measured, *predicted)):
            continue
        live, twin = (np.array([run[name] for run in runs], dtype=np.float64) for runs in (measured, predicted))
        # Transfers over a link that takes no time.
        relative = np.divide(twin, live, out=np.ones_like(live), where=live != 0) - 1
        errors = twin - live if name in DIFFERENCES else relative
        entries[name] = error_entry(live, twin, errors, float(live.std(ddof=1)), GOALS.get(name))
    return entries


def missed_goals(document: Mapping[str, Any], tolerance: float) -> list[str]:
    """One line for each goal, times `tolerance`, that the prediction misses."""
    lines = [
        f"{entry['topology']}: {name} is off by {100 * metric['error']:+.1f} {_unit(name)},"
        f" goal {100 * metric['goal'] * tolerance:g} {_unit(name)}"
        for entry in document["ratios"]
        for name, metric in entry["metrics"].items()
        if metric["goal"] is not None and abs(metric["error"]) > metric["goal"] * tolerance
    ]
    for name, goal in MEAN_GOALS.items():
        if (error := document["mean_absolute_errors"][name]) > goal * tolerance:
            lines.append(
                f"all ratios: {name} is off by {100 * error:.1f} % on average, goal {100 * goal * tolerance:g} %"
            )
    if document["regret"] > REGRET_GOAL * tolerance:
        lines.append(
            f"choosing {document['best_ratio']['predicted']}A-1F loses {100 * document['regret']:.1f} % of the measured"
            f" throughput, goal {100 * REGRET_GOAL * tolerance:g} %"
        )
    return lines


def _unit(name: str) -> str:
    return "points" if name in DIFFERENCES else "%"


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

    def missed(self, document: Mapping[str, Any], tolerance: float) -> list[str]:
        """See `missed_goals`."""
        return missed_goals(document, tolerance)

    def _measure(self, x: int, repeat: int) -> tuple[list[TimedStretch], BundleTimes]:
        """The stretches of a bundle with random requests, and the times of one with the workload's."""
        name = f"ratio-{x}-repeat-{repeat + 1}"
        profiling, live = (self.run.path / part / name for part in ("profiling", "live"))
        if name in self.run.points():
            return read_stretches(profiling), read_times(live)
        self.note(f"profiling and running {x}A-1F, repeat {repeat + 1} of {self.scenario.repeats}")
        supplies = workload_supply(self.scenario, x, repeat), profiling_supply(self.scenario, x, repeat)
        with blamed_on("workload"), contention_meter() as contention:
            (measured, _), (profiled, work) = self.backend.run_in_turns(
                x, [(supply.prefill, supply.decode, supply.completions or 0) for supply in supplies]
            )
        recorded = RecordedWork(work)
        RoleBundle(self._config(x), replace(supplies[1], completions=len(profiled.ids)), recorded).run()
        write_stretches(profiling, recorded.timed)
        write_times(live, measured)
        counts = {"stretches": len(recorded.timed), "requests": len(measured.ids)}
        self.run.add_point(name, {**counts, "contention": contention})
        return recorded.timed, measured

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
