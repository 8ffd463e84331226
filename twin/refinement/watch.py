"""`twin watch`: a running engine compared with its prediction, minute by minute, until it drifts.

The first minutes tell by how much the engine differs from the scenario. After them the sum of further deviations, each
less half of the drift to be found (Page's CUSUM test, one sum upwards and one downwards), raises an alarm above a
threshold, which Siegmund's formula sets for the false alarms that are allowed a day.

A minute's inter-token latency depends on what an average step computes: how many requests decode, and how many prompt
tokens. Both follow from a server's metrics pages, so that it is compared with that of simulated minutes of equal
batches (`LoadCurve`). Bursts and queues, which differ from minute to minute, are then no error of the comparison; and
if steps take 5 % longer, so does latency compared in this way, at any load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from scenarios.reading import Settings
from scenarios.serving import ReplaySpec
from twin.recording.server_pages import CACHED, FINISHED, HISTOGRAMS, OUTPUTS, PROMPTS, Growth, Scrape
from twin.refinement.question import Advance, Question, one_step_time, plan_of
from twin.refinement.refine import Refinement, refine
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.summary import Run
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

    n requests decode in an average step, and q prompt tokens are computed in it. `rates`: lowest and highest measured
    requests a second. `seconds`: of a window. `deviation`: of the logarithm of a window's latency about the curve.
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
    return plan_of(question, {**question.settings, **settings, "detail": "requests"})


SERVER = 0.01
"""Deviation of a window's latency that neither steps nor sampling explain: streams, and the machine's drift."""

FALSE_ALARMS = 0.01
"""Probability of an alarm in a day without a drift."""

MIN_LEARNED = 3
"""Windows without which the scenario's own error is not known."""

OVERSHOOT = 1.166
"""What a sum in units of a deviation exceeds its threshold by in Siegmund's formula, for both ends together."""

LENGTHS, SAMPLING = 0.1, 3.0
"""Relative change of mean lengths from which an alarm is put down to the requests; it is at least so many deviations of
the mean of lengths that vary as much as their mean."""

DAY = 86400.0

PREDICTED, DRIFTED, UNDECIDED = "as predicted", "drifted", "undecided"


@dataclass(frozen=True)
class WatchOptions:
    """The search for a drift: seconds judged at a time, the relative change of latency to be found, and seconds at the
    beginning that tell the scenario's own error; 0: it has none.
    """

    window: float = 60.0
    drift: float = 0.05
    learn: float = 600.0


class Watch:
    """A scenario beside the pages of an engine. Loads are simulated when they are first seen."""

    def __init__(self, question: Question, options: WatchOptions, advance: Advance = lambda text: None) -> None:
        self._question = question
        self._options = options
        self._advance = advance
        self._curve: LoadCurve | None = None

    def judge(self, pages: Sequence[Scrape]) -> dict[str, Any]:
        """The document `twin.watch/1` of all pages so far, in order of time."""
        options = self._options
        windows = page_windows(pages, options.window)
        document: dict[str, Any] = {
            "schema": "twin.watch/1", "scenario": str(self._question.path), "pages": len(pages),
            "window": options.window, "drift": options.drift, "verdict": UNDECIDED, "windows": [],
        }  # fmt: skip
        rates = windows.requests / (windows.end - windows.start)
        rates = rates[rates > 0]
        if not len(rates):
            return document
        curve = self._curve_of(float(rates.min()), float(rates.max()))
        judged = windows.where(curve.covers(windows))
        excess = curve.excess(judged)
        learning = judged.end <= pages[0].at + options.learn
        learned = int(learning.sum())
        document |= {"not_judged": len(windows) - len(judged), "learned": learned}
        if options.learn and learned < MIN_LEARNED:
            return document
        test = DriftTest(excess[learning], curve.deviation, options)
        later, further = judged.where(~learning), excess[~learning] - test.offset
        document |= {
            "offset": math.expm1(test.offset), "deviation": test.deviation, "minutes_to_find": test.minutes,
            "windows": _rows(later, curve, further),
        }  # fmt: skip
        alarm = test.run(further)
        if alarm is None:
            return document | {"verdict": PREDICTED if len(later) else UNDECIDED}
        return document | {"verdict": DRIFTED, "alarm": _alarm(judged, later, further, alarm, test.deviation)}

    def refine(self, document: Mapping[str, Any]) -> Refinement:
        """Step times corrected by the pages since the alarm, at the load of that time."""
        question, since = self._question, document["alarm"]["since"]
        assert self._curve is not None, "an alarm comes from a curve"
        settings = {**question.settings, **self._curve.settings_at(document["alarm"]["rate"])}
        return refine(replace(question, settings=settings, since=since), self._advance)

    def _curve_of(self, low: float, high: float) -> LoadCurve:
        """The curve for rates up to these; simulated again only if they are beyond those of the last one."""
        curve = self._curve
        if curve is None or low < curve.rates[0] or high > curve.rates[1]:
            if curve is not None:
                low, high = min(low, curve.rates[0]), max(high, curve.rates[1])
            curve = self._curve = LoadCurve(self._question, (low, high), self._options.window, self._advance)
        return curve


class DriftTest:
    """What the first windows tell, and the test of those that follow.

    `learned`: logarithms of measured over predicted latency of the first windows; `offset`: their mean. `deviation`: of
    the curve, then of a window about that mean. `minutes`: until a drift is found, on average.
    """

    def __init__(self, learned: Floats, deviation: float, options: WatchOptions) -> None:
        self.offset = float(learned.mean()) if len(learned) else 0.0
        scatter = float(np.std(learned, ddof=1)) if len(learned) >= MIN_LEARNED else 0.0
        self.deviation = math.hypot(max(deviation, scatter), SERVER)
        self._cusum = Cusum(math.log1p(options.drift) / self.deviation, options.window, len(learned))
        self.minutes = self._cusum.delay * options.window / 60

    def run(self, further: Floats) -> tuple[int, int] | None:
        """The first and the last window of an alarm. `further`: the logarithms less `offset`."""
        return self._cusum.run(further / self.deviation)


class Cusum:
    """Page's test for a shift of the mean of standard normal scores, both ways.

    `shift`: to be found, in deviations. `seconds`: of a window, of which a day has so many fewer. `learned`: windows
    that the mean was estimated from, whose own error the allowance, which each score is less by, leaves room for.
    `threshold`: of the sums. `delay`: windows until `shift` is found, on average.
    """

    def __init__(self, shift: float, seconds: float, learned: int) -> None:
        error = 2.0 / math.sqrt(learned) if learned else 0.0
        self.allowance = shift / 2
        drift = max(self.allowance - error, self.allowance / 4)
        between_alarms = 2 * (DAY / seconds) / FALSE_ALARMS

        def mean_windows(threshold: float, shift: float) -> float:
            """Siegmund's mean windows until an alarm, of scores whose mean less the allowance is `shift`."""
            exponent = -2 * shift * (threshold + OVERSHOOT)
            return (math.expm1(min(exponent, 700.0)) - exponent) / (2 * shift**2)

        self.threshold = float(brentq(lambda value: mean_windows(value, -drift) - between_alarms, 0.0, 350.0 / drift))
        self.delay = mean_windows(self.threshold, shift - self.allowance)

    def run(self, scores: Floats) -> tuple[int, int] | None:
        """The first and the last window of the sum that raises the alarm; None without one."""
        sums, starts = [0.0, 0.0], [0, 0]
        for i, score in enumerate(scores.tolist()):
            for side, sign in enumerate((1.0, -1.0)):
                sums[side] += sign * score - self.allowance
                if sums[side] <= 0.0:
                    sums[side], starts[side] = 0.0, i + 1
                elif sums[side] > self.threshold:
                    return starts[side], i
        return None


def _rows(windows: Windows, curve: LoadCurve, excess: Floats) -> list[dict[str, float]]:
    names = ("end", "measured", "predicted", "excess", "decoding", "prompt_rate")
    columns = (windows.end, windows.itl, curve.predicted(windows), excess, windows.decoding, windows.prompt_rate)
    return [dict(zip(names, row, strict=True)) for row in np.array(columns).T.tolist()]


def _alarm(
    judged: Windows, later: Windows, further: Floats, alarm: tuple[int, int], deviation: float
) -> dict[str, Any]:
    """When latency changed, by how much, and whether the requests did, too."""
    first, last = alarm
    before = judged.where(judged.end <= later.start[first])
    after = later.where(np.arange(first, last + 1))
    change = float(further[first : last + 1].mean())
    half_width = 1.96 * deviation / math.sqrt(len(after))
    lengths = {
        name: float((getattr(after, name).sum() / after.requests.sum())
                    / (getattr(before, name).sum() / before.requests.sum()) - 1)
        for name in ("prompts", "outputs") if before.requests.sum() and after.requests.sum()
    }  # fmt: skip
    limit = max(LENGTHS, SAMPLING / math.sqrt(max(after.requests.sum(), 1.0)))
    return {
        "since": float(later.start[first]), "found": float(later.end[last]), "change": math.expm1(change),
        "rate": float(after.requests.sum() / (after.end - after.start).sum()),
        "interval": [math.expm1(change - half_width), math.expm1(change + half_width)],
        "lengths": lengths, "cause": "requests" if any(abs(value) > limit for value in lengths.values()) else "engine",
    }  # fmt: skip
