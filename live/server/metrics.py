"""What Prometheus is told, under vLLM's names.

Observations are counted in plain lists, since the client library's own histograms take a lock and look up a label for
each: a step of 256 sequences observes 256 gaps. The library writes the page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from live.engine import Engine
from live.server.tickets import Reason, Ticket

FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
"""Upper bounds of buckets, seconds: vLLM's, as the two below."""

BETWEEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
"""Three more below 10 ms than vLLM's, where small models live."""

WHOLE = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


class Histogram:
    """Observations counted by bucket.

    Attributes:
        bounds: upper bounds, ascending. counts: one more than bounds. total: sum of what was observed.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        names = [*(str(bound) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class Tally:
    """What has happened, counted on the event loop."""

    def __init__(self) -> None:
        self.time_to_first_token, self.inter_token = Histogram(FIRST), Histogram(BETWEEN)
        self.per_output_token, self.end_to_end = Histogram(BETWEEN), Histogram(WHOLE)
        self.generation_tokens = self.prompt_tokens = 0
        self.reasons: Counter[str] = Counter()

    def token(self, ticket: Ticket, now: float) -> None:
        """A generation has been given a token."""
        self.generation_tokens += 1
        if ticket.first >= 0:
            self.inter_token.observe(now - ticket.latest)
        else:
            self.time_to_first_token.observe(now - ticket.arrived)

    def finished(self, ticket: Ticket, reason: Reason) -> None:
        """A generation is over."""
        self.reasons[reason] += 1
        if reason in ("abort", "error"):
            return
        self.prompt_tokens += ticket.generation.request.prompt_tokens
        self.end_to_end.observe(ticket.latest - ticket.arrived)
        tokens = len(ticket.generation.output)
        if tokens > 1:
            self.per_output_token.observe((ticket.latest - ticket.first) / (tokens - 1))


class Page(Collector):
    """The metrics page of one engine: what the event loop has counted, and where the scheduler is now."""

    def __init__(self, tally: Tally, engine: Engine, model: str) -> None:
        self.tally, self.engine, self.model = tally, engine, model
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """As the client library asks."""
        yield from self._histograms()
        yield from self._gauges()
        yield from self._counters()

    def _histograms(self) -> Iterator[Metric]:
        tally = self.tally
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", tally.time_to_first_token),
            ("inter_token_latency_seconds", "Between a token and the next.", tally.inter_token),
            (
                "request_time_per_output_token_seconds",
                "TPOT of requests of two or more tokens.",
                tally.per_output_token,
            ),
            ("e2e_request_latency_seconds", "From a request's arrival to its end.", tally.end_to_end),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self.model], histogram.buckets(), histogram.total)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        core = self.engine.core
        for name, text, value in (
            ("num_requests_running", "Requests that hold a seat or run in this step.", core.admitted),
            ("num_requests_waiting", "Requests that wait for admission.", core.waiting),
            ("kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1.", 1 - core.kv.free / core.kv.blocks),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family

    def _counters(self) -> Iterator[Metric]:
        core, tally = self.engine.core, self.tally
        counters: tuple[tuple[str, str, Any], ...] = (
            (
                "prefix_cache_queries",
                "Prompt tokens looked for in the cache.",
                core.prefill_tokens + core.cached_tokens,
            ),
            ("prefix_cache_hits", "Prompt tokens found there.", core.cached_tokens),
            ("num_preemptions", "Caches taken away and computed again.", core.preemptions),
            ("generation_tokens", "Tokens given.", tally.generation_tokens),
            ("prompt_tokens", "Prompt tokens of requests that were answered.", tally.prompt_tokens),
        )
        for name, text, value in counters:
            family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family
        family = CounterMetricFamily(
            "vllm:request_success", "Requests by how they ended.", labels=["model_name", "finished_reason"]
        )
        for reason in get_args(Reason):
            family.add_metric([self.model, reason], tally.reasons[reason])
        yield family
