"""Metrics for Prometheus, under vLLM's names.

Observations are counted in plain lists: the client library's own histograms take a lock and look up a label in each
call, and a step of 256 sequences makes 256 observations. The library only writes the page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from live.backend import Backend
from live.server.request_state import FinishedReason, RequestState
from schedulers.speculation import SpeculationStats

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
"""Upper bounds of the buckets for time to first token, seconds: vLLM's, as the two below."""

ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
"""Upper bounds for inter-token latency, with three more below 10 ms than vLLM has, for small models."""

E2E_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


class Histogram:
    """Observations counted by bucket.

    Attributes:
        bounds: upper bounds, ascending. counts: one more entry than bounds. total: sum of all observations.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, in Prometheus' form."""
        names = [*(str(bound) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class ClassStats:
    """Histograms of one service class, and its shed requests by the limit that was reached."""

    def __init__(self) -> None:
        self.time_to_first_token, self.end_to_end = Histogram(TTFT_BUCKETS), Histogram(E2E_BUCKETS)
        self.shed: Counter[str] = Counter()


class ServerStats:
    """Counters and histograms of the server, updated on the event loop.

    Attributes:
        classes: those of service classes by name; "" has the requests without one.
    """

    def __init__(self, classes: Iterable[str] = ()) -> None:
        self.classes = {name: ClassStats() for name in ("", *classes)}
        self.time_to_first_token, self.inter_token = Histogram(TTFT_BUCKETS), Histogram(ITL_BUCKETS)
        self.per_output_token, self.end_to_end = Histogram(ITL_BUCKETS), Histogram(E2E_BUCKETS)
        self.generation_tokens = self.prompt_tokens = 0
        self.reasons: Counter[str] = Counter()

    def record_tokens(self, state: RequestState, now: float) -> None:
        """Count the new tokens of a generation: one, or with speculation several that came together.

        Tokens that came together are one observation of the latency between tokens, as in vLLM.
        """
        tokens = len(state.generation.output)
        self.generation_tokens += tokens - state.num_recorded
        state.num_recorded = tokens
        if state.first_token_time >= 0:
            self.inter_token.observe(now - state.last_token_time)
        else:
            self.time_to_first_token.observe(now - state.arrival_time)
            self._of(state).time_to_first_token.observe(now - state.arrival_time)

    def record_finished(self, state: RequestState, reason: FinishedReason) -> None:
        """Count a finished generation."""
        self.reasons[reason] += 1
        if reason in ("abort", "error"):
            return
        self.prompt_tokens += state.generation.request.prompt_tokens
        self.end_to_end.observe(state.last_token_time - state.arrival_time)
        self._of(state).end_to_end.observe(state.last_token_time - state.arrival_time)
        tokens = len(state.generation.output)
        if tokens > 1:
            self.per_output_token.observe((state.last_token_time - state.first_token_time) / (tokens - 1))

    def record_shed(self, state: RequestState, reason: str) -> None:
        """Count a generation that the engine has shed."""
        self._of(state).shed[reason] += 1

    def _of(self, state: RequestState) -> ClassStats:
        return self.classes[state.generation.request.service_class]


class PrometheusExporter(Collector):
    """The metrics page of one backend: the server's counters, and the schedulers' present state."""

    def __init__(self, stats: ServerStats, backend: Backend, model: str) -> None:
        self.stats, self.backend, self.model = stats, backend, model
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def text(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The client library's hook."""
        yield from self._histograms()
        yield from self._gauges()
        yield from self._counters()
        yield from self._classes()

    def _classes(self) -> Iterator[Metric]:
        """Latencies by service class, where there are some, and what was shed."""
        classes, labels = self.stats.classes, ["model_name", "service_class"]
        if len(classes) > 1:
            for name, text in (
                ("time_to_first_token_seconds", "From a request's arrival to its first token, by service class."),
                ("e2e_request_latency_seconds", "From a request's arrival to its end, by service class."),
            ):
                family = HistogramMetricFamily(f"serving_twin:class_{name}", text, labels=labels)
                for service_class, stats in classes.items():
                    found = stats.time_to_first_token if name.startswith("time") else stats.end_to_end
                    family.add_metric([self.model, service_class], found.buckets(), found.total)
                yield family
        shed = CounterMetricFamily(
            "serving_twin:requests_shed", "Requests shed, by the limit that was reached.", labels=[*labels, "reason"]
        )
        for service_class, stats in classes.items():
            for reason, count in stats.shed.items():
                shed.add_metric([self.model, service_class, reason], count)
        yield shed

    def _histograms(self) -> Iterator[Metric]:
        stats = self.stats
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", stats.time_to_first_token),
            ("inter_token_latency_seconds", "Between an output token and the next.", stats.inter_token),
            (
                "request_time_per_output_token_seconds",
                "Time per output token of requests with two or more output tokens.",
                stats.per_output_token,
            ),
            ("e2e_request_latency_seconds", "From a request's arrival to its end.", stats.end_to_end),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self.model], histogram.buckets(), histogram.total)
            yield family
        if steps := self.backend.state().steps_by_models:
            by_models = Histogram(range(1, len(steps) + 1))
            for models, count in enumerate(steps, 1):
                by_models.counts[models - 1] = count
                by_models.total += models * count
            text = "Models among the sequences of a decode step."
            family = HistogramMetricFamily("serving_twin:models_per_decode_step", text, labels=["model_name"])
            family.add_metric([self.model], by_models.buckets(), by_models.total)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        state = self.backend.state()
        for name, text, value in (
            ("num_requests_running", "Requests that are running or run in this step.", state.num_running),
            ("num_requests_waiting", "Requests that wait to be scheduled.", state.num_waiting),
            (
                "kv_cache_usage_perc",
                "Fraction of KV cache blocks in use, 0 to 1.",
                state.kv_cache_usage,
            ),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family

        limits = self.backend.limits
        names = ["model_name", "block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's settings, as labels.", labels=names)
        family.add_metric([self.model, str(limits.block_size), str(limits.num_gpu_blocks)], 1)
        yield family

    def _counters(self) -> Iterator[Metric]:
        state, stats = self.backend.state(), self.stats
        counters: tuple[tuple[str, str, Any], ...] = (
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                state.prefill_tokens + state.cached_tokens,
            ),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", state.cached_tokens),
            ("num_preemptions", "Preemptions, whose KV cache is recomputed.", state.preemptions),
            ("generation_tokens", "Output tokens.", stats.generation_tokens),
            ("prompt_tokens", "Prompt tokens of finished requests.", stats.prompt_tokens),
        )
        for name, text, value in counters:
            family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family
        yield from self._speculation(state.speculation)
        family = CounterMetricFamily(
            "vllm:request_success", "Finished requests by reason.", labels=["model_name", "finished_reason"]
        )
        for reason in get_args(FinishedReason):
            family.add_metric([self.model, reason], stats.reasons[reason])
        yield family

    def _speculation(self, stats: SpeculationStats | None) -> Iterator[Metric]:
        """Counters of draft tokens, where the engine speculates."""
        if stats is None:
            return
        for name, text, value in (
            ("drafts", "Decodes that verified draft tokens.", stats.num_drafts),
            ("draft_tokens", "Draft tokens that were verified.", stats.num_draft_tokens),
            ("accepted_tokens", "Draft tokens that were right.", stats.num_accepted_tokens),
        ):
            family = CounterMetricFamily(f"vllm:spec_decode_num_{name}", text, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were right, by position in the draft.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            family.add_metric([self.model, str(position)], count)
        yield family
