"""Goals of a plan: `ttft_p99: 1s`, `classify.e2e_mean: 200ms`, `goodput: 95%`, `output_throughput: 5000`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from workloads.errors import BadInput

LATENCY = re.compile(r"(?:(?P<of>[\w-]+)\.)?(?P<metric>ttft|tpot|itl|e2e)_(?P<statistic>mean|p\d{1,2}(?:\.\d+)?)")
THROUGHPUTS = ("output_throughput", "request_throughput")
TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
SHARES = {"": 1.0, "%": 1e-2}
LONGEST = {"ttft": 300.0, "tpot": 10.0, "itl": 10.0, "e2e": 3600.0}
"""Seconds of a latency above which a number without a unit can only be meant in milliseconds."""
_VALUE = re.compile(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([a-z%]*)\s*")
KNOWN = (
    "expected METRIC_STATISTIC such as ttft_p99, tpot_mean or classify.e2e_p95 (ttft, tpot, itl, e2e; mean or a "
    "percentile), goodput, output_throughput or request_throughput"
)


@dataclass(frozen=True)
class Goal:
    """One goal: `ttft`, `tpot`, `itl`, `e2e`, `goodput`, or a throughput; its limit in seconds, a share, or a rate.

    `quantile`: of a percentile; None for others. `of`: the task or model of its requests; None: all of them.
    """

    name: str
    metric: str
    limit: float
    quantile: float | None = None
    of: str | None = None

    @property
    def at_most(self) -> bool:
        """True for latencies, which must not exceed the limit; the others must reach it."""
        return self.metric in ("ttft", "tpot", "itl", "e2e")

    @property
    def of_whole_requests(self) -> bool:
        """True for goals that a client's times of its requests decide: no single tokens, tasks or goodput."""
        return self.of is None and (self.metric in ("ttft", "tpot", "e2e") or self.metric in THROUGHPUTS)

    def ratio(self, value: float) -> float:
        """The value relative to the limit, such that 1 is the limit and more is a miss."""
        if self.at_most:
            return value / self.limit
        return self.limit / value if value > 0 else float("inf")


def read_goals(limits: Mapping[str, float | str]) -> list[Goal]:
    return [read_goal(name, limit) for name, limit in limits.items()]


def refuse_milliseconds(metric: str, limit: float, field: str) -> None:
    """Refuse a number of seconds that can only be meant in milliseconds."""
    if limit > LONGEST.get(metric, float("inf")):
        expected = f"expected seconds, at most {LONGEST[metric]:g}; {limit / 1000:g} is {limit:g} milliseconds"
        raise BadInput(expected, field=field, value=limit)


def read_goal(name: str, limit: float | str) -> Goal:
    value = _number(name, limit)
    if name == "goodput":
        if value > 1:
            raise BadInput("expected a share of the requests, at most 1 or 100%", field=name, value=limit)
        return Goal(name, name, value)
    if name in THROUGHPUTS:
        return Goal(name, name, value)
    match = LATENCY.fullmatch(name)
    if match is None:
        raise BadInput(KNOWN, field="goals", value=name)
    of, metric, statistic = match["of"], match["metric"], match["statistic"]
    if has_no_unit(limit):
        refuse_milliseconds(metric, value, name)
    if of is not None and metric == "itl":
        raise BadInput("expected ttft, tpot or e2e: ITL is of steps, which serve all requests", field=name, value=name)
    quantile = None if statistic == "mean" else float(statistic[1:]) / 100
    if quantile == 0:
        raise BadInput("expected a percentile above 0", field="goals", value=name)
    return Goal(name, metric, value, quantile, of)


def has_no_unit(limit: float | str) -> bool:
    """True for a number, also as text."""
    match = _VALUE.fullmatch(limit) if isinstance(limit, str) else None
    return not isinstance(limit, str) or (match is not None and not match[2])


def _number(name: str, limit: float | str) -> float:
    if isinstance(limit, str):
        match, units = _VALUE.fullmatch(limit), SHARES if name == "goodput" else TIMES
        if match is None or match[2] not in units:
            examples = "95%" if name == "goodput" else "1s, 40ms"
            raise BadInput(f"expected a number, or one with a unit: {examples}", field=name, value=limit)
        try:
            limit = float(match[1]) * units[match[2]]
        except ValueError:
            raise BadInput("expected a number", field=name, value=limit) from None
    if not limit > 0:
        raise BadInput("expected a number above 0", field=name, value=limit)
    return float(limit)
