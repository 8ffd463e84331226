"""Inter-token latency as a function of the batches of the same minute, from simulations at several loads.

It depends on what an average step computes: how many requests decode, and how many prompt tokens. Both follow from a
server's metrics pages, so that a minute's latency is compared with that of simulated minutes of equal batches. Bursts
and queues, which differ from minute to minute, are then no error of the comparison; and if steps take 5 % longer, so
does latency compared in this way, at any load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scenarios.reading import Settings
from scenarios.serving import ReplaySpec, check_scenario
from twin.recording.scrapes import CACHED, FINISHED, HISTOGRAMS, OUTPUTS, PROMPTS, Growth, Scrape
from twin.refinement.question import Advance, Question, one_step_time
from twin.serving.plan.plan import ServingPlan, make_plan
from twin.serving.results.run import Run
from twin.serving.run.simulation import Simulation
from workloads.errors import BadInput

Floats = NDArray[np.float64]

LOADS, WINDOWS, MOST_REQUESTS = 5, 40, 20_000
"""Simulated loads; windows and requests at most of each."""

MARGIN = 1.25
"""Simulated loads reach so far beyond the lowest and the highest measured one."""

MIN_TOKENS = 200
"""Output tokens below which a window is not judged: its engine was idle nearly all the time."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of an engine's time, in columns of shape (n,).

    Attributes:
        start, end: seconds, of pages since 1970. itl: mean inter-token latency, seconds.
        decoding: requests between their first and their last token, averaged over time.
        prompt_rate: prompt tokens computed a second, without those of the prefix cache.
        requests: finished ones. prompts, outputs: tokens.
    """

    start: Floats
    end: Floats
    itl: Floats
    decoding: Floats
    prompt_rate: Floats
    requests: Floats
    prompts: Floats
    outputs: Floats

    def __len__(self) -> int:
        return len(self.end)

    def where(self, mask: NDArray[Any]) -> Windows:
        return Windows(*(getattr(self, field.name)[mask] for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Windows]) -> Windows:
        """All windows of several series."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def page_windows(pages: Sequence[Scrape], seconds: float) -> Windows:
    """Windows of `seconds` or more between pages; those in which the server was restarted or idle are left out."""
    rows, first = [], pages[0]
    for page in pages[1:]:
        if page.at - first.at < 0.999 * seconds:
            continue
        first, row = page, _window(first, page)
        if row is not None:
            rows.append(row)
    return Windows(*np.array(rows, dtype=np.float64).reshape(-1, len(fields(Windows))).T)


def _window(first: Scrape, last: Scrape) -> tuple[float, ...] | None:
    growth = Growth(first, last)
    family = next((name for name in HISTOGRAMS["itl"] if f"{name}_count" in last.values), None)
    if family is None:
        raise BadInput(f"expected {HISTOGRAMS['itl'][0]}", file=last.source)
    names = (f"{family}_sum", f"{family}_count", PROMPTS, CACHED, FINISHED, OUTPUTS)
    try:
        total, count, prompts, cached, finished, outputs = (growth.of(name) or 0.0 for name in names)
    except BadInput:  # restarted
        return None
    if count < MIN_TOKENS:
        return None
    computed = max(prompts - cached, 0.0) / growth.seconds
    return (first.at, last.at, total / count, total / growth.seconds, computed, finished, prompts, outputs)


def run_windows(run: Run, seconds: float) -> Windows:
    """Windows of each engine of a simulation, without the first and the last one. Needs the detail of requests."""
    table = run.columns.table()
    return Windows.joined([_engine_windows(run, engine.name, table, seconds) for engine in run.engines])


def _engine_windows(run: Run, name: str, table: dict[str, Any], seconds: float) -> Windows:
    log = next(log for log in run.logs if log.name == name)
    parts = [(ends, np.repeat(decodes, repeats)) for ends, decodes, repeats in log.step_parts(1 << 62)]
    if not parts:
        return Windows(*np.zeros((len(fields(Windows)), 0)))
    ends, decodes = parts[0]
    grid = np.arange(1.0, run.end / seconds - 1.0) * seconds

    def grown(times: Floats, amounts: Floats) -> Floats:
        """The sum of amounts in each window, of those at these times."""
        order = np.argsort(times, kind="stable")
        sums = np.concatenate([[0.0], np.cumsum(amounts[order])])
        growth: Floats = np.diff(sums[np.searchsorted(times[order], grid, side="right")])
        return growth

    total, count = grown(ends, np.diff(ends, prepend=ends[0]) * decodes), grown(ends, decodes.astype(np.float64))
    rows = table["replica"] == name
    first, last = (np.asarray(table[column], dtype=np.float64)[rows] for column in ("first_token", "last_token"))
    prompts, cached = (np.asarray(table[column])[rows] for column in ("prompt_tokens", "cached_tokens"))
    computed = grown(first, (prompts - cached).astype(np.float64))
    finished = grown(last, np.ones(len(last)))
    windows = Windows(
        grid[:-1], grid[1:], total / np.maximum(count, 1.0), total / seconds, computed / seconds, finished,
        grown(first, prompts.astype(np.float64)), count + finished,
    )  # fmt: skip
    return windows.where(count >= MIN_TOKENS)


class LoadCurve:
    """A scenario's inter-token latency, a + b·n + c·q with squares and product, by least squares.

    n requests decode in an average step, and q prompt tokens are computed in it.

    Args:
        question: the scenario and its settings. rates: lowest and highest measured requests a second.
        seconds: of a window.

    Attributes:
        deviation: of the logarithm of a window's latency about the curve.
        prompt_tokens, output_tokens: means of the simulated requests.

    Raises:
        BadInput: prefill and decode are apart, or too few windows have answers.
    """

    def __init__(self, question: Question, rates: tuple[float, float], seconds: float, advance: Advance) -> None:
        self.rates = rates[0] / MARGIN, rates[1] * MARGIN
        plan = load_plan(question, {})
        one_step_time(plan)
        base = Simulation(replace(plan, requests=min(plan.requests, MOST_REQUESTS))).run()
        engines = len(base.engines)
        self._plan = plan
        self._base_rate = len(base.columns.arrival) / base.end / engines
        replayed = isinstance(plan.scenario.workload.arrivals, ReplaySpec)
        most = plan.requests if replayed else MOST_REQUESTS
        parts = []
        for target in np.geomspace(*self.rates, LOADS).tolist():
            advance("simulating")
            requests = min(max(round(WINDOWS * seconds * target * engines), 200), most)
            run = Simulation(replace(load_plan(question, self.settings_at(target)), requests=requests)).run()
            parts.append(run_windows(run, seconds))
        windows = Windows.joined(parts)
        if len(windows) < 3 * LOADS:
            expected = f"expected longer windows or a busier scenario: {len(windows)} simulated windows have answers"
            raise BadInput(expected, field="--window", value=seconds)
        self.prompt_tokens = float(windows.prompts.sum() / windows.requests.sum())
        self.output_tokens = float(windows.outputs.sum() / windows.requests.sum())
        weighted = _terms(windows) / windows.itl[:, None]
        self._coefficients = np.linalg.lstsq(weighted, np.ones(len(windows)), rcond=None)[0]
        self._limits = 1.1 * windows.decoding.max(), 1.1 * windows.prompt_rate.max()
        self.deviation = float(np.std(self.excess(windows), ddof=len(self._coefficients)))

    def settings_at(self, rate: float) -> Settings:
        """The setting that gives an engine this many requests a second; a load that cannot be set stays as it is."""
        arrivals = self._plan.scenario.workload.arrivals
        for field in ("rate", "speed", "concurrency"):
            value = getattr(arrivals, field, None)
            if value is not None:
                number = value * rate / self._base_rate
                return {f"workload.arrivals.{field}": max(round(number), 1) if field == "concurrency" else number}
        return {}

    def predicted(self, windows: Windows) -> Floats:
        """Inter-token latency of each window's batches, seconds."""
        latency: Floats = _terms(windows) @ self._coefficients
        return latency

    def excess(self, windows: Windows) -> Floats:
        """Logarithm of measured over predicted latency."""
        return np.log(windows.itl / self.predicted(windows))

    def covers(self, windows: Windows) -> NDArray[np.bool_]:
        """The windows whose load was simulated."""
        inside: NDArray[np.bool_] = (windows.decoding <= self._limits[0]) & (windows.prompt_rate <= self._limits[1])
        return inside & (windows.itl > 0)


def _terms(windows: Windows) -> Floats:
    n, q = windows.decoding, windows.prompt_rate * windows.itl
    return np.stack([np.ones(len(n)), n, q, n * n, n * q, q * q], axis=1)


def load_plan(question: Question, settings: Settings) -> ServingPlan:
    """The plan of a scenario with changed fields, whose runs keep the times of requests."""
    changes = {**question.settings, **settings, "detail": "requests"}
    scenario = check_scenario(question.document, changes, question.path)
    base = question.path.parent
    return make_plan(scenario, base, scenario.workload.read_trace(base))
