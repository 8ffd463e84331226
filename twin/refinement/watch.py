"""`twin watch`: a running engine compared with its prediction, minute by minute, until it drifts.

The first minutes tell by how much the engine differs from the scenario. After them the sum of further deviations, each
less half of the drift to be found (Page's CUSUM test, one sum upwards and one downwards), raises an alarm above a
threshold, which Siegmund's formula sets for the false alarms that are allowed a day.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from twin.recording.scrapes import Scrape
from twin.refinement.load_curve import LoadCurve, Windows, page_windows
from twin.refinement.question import Advance, Question
from twin.refinement.refine import Refinement, refine

Floats = NDArray[np.float64]

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
    """What is looked for.

    Attributes:
        window: seconds that are judged at a time. drift: relative change of latency to be found.
        learn: seconds at the beginning that tell the scenario's own error; 0: it has none.
    """

    window: float = 60.0
    drift: float = 0.05
    learn: float = 600.0


class Watch:
    """A scenario beside the pages of an engine. Loads are simulated when they are first seen.

    Raises:
        BadInput: pages without latencies, prefill and decode apart, or windows with too few answers.
    """

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

    Args:
        learned: logarithms of measured over predicted latency of the first windows. deviation: of the curve.

    Attributes:
        offset: the mean of `learned`. deviation: of a window about it. minutes: until a drift is found, on average.
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

    Args:
        shift: to be found, in deviations. seconds: of a window, of which a day has so many fewer.
        learned: windows that the mean was estimated from, whose own error the allowance leaves room for.

    Attributes:
        allowance: subtracted from each score. threshold: of the sums.
        delay: windows until `shift` is found, on average.
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
