"""Metrics for Prometheus, under vLLM's names.

Observations are counted in plain lists: the client library's own histograms take a lock and look up a label in each
call, and a step of 256 sequences makes 256 observations. The library only writes the page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from live.backend import Backend, BackendState
from schedulers.engine_config import NULL_BLOCKS
from workloads.request import Request

FinishedReason: TypeAlias = Literal["stop", "length", "abort", "error"]
"""The end of a generation, by the names of the metrics."""

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


Table: TypeAlias = tuple[Callable[..., Any], str, str, str, list[tuple[Any, ...]]]
"""A metric: its family, name and text, its labels, and rows of its labels' values and its own."""


FIRST, END = "From a request's arrival to its first token", "From a request's arrival to its end"


class Histogram:
    """Observations counted by bucket.

    Attributes:
        bounds: upper bounds, ascending. counts: one more entry than bounds. total: sum of all observations.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def row(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum, in Prometheus' form."""
        names = [*(str(bound) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True)), self.total


class ClassStats:
    """Histograms of one service class, and its shed requests by the limit that was reached."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.end_to_end = Histogram(E2E_BUCKETS)
        self.shed: Counter[str] = Counter()


class ServerStats:
    """Counters and histograms of the server, updated on the event loop.

    Attributes:
        classes: those of service classes by name; "" has the requests without one.
    """

    def __init__(self, classes: Iterable[str] = ()) -> None:
        self.classes = {name: ClassStats() for name in ("", *classes)}
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.inter_token = Histogram(ITL_BUCKETS)
        self.per_output_token = Histogram(ITL_BUCKETS)
        self.end_to_end = Histogram(E2E_BUCKETS)
        self.generation_tokens = self.prompt_tokens = 0
        self.reasons: Counter[str] = Counter()

    def record_tokens(self, service_class: str, tokens: int, seconds: float, *, first: bool) -> None:
        """Count the new tokens of a generation: one, or with speculation several that came together.

        Tokens that came together are one observation of the latency between tokens, as in vLLM.

        Args:
            seconds: since the generation's arrival for the first tokens, else since those before.
        """
        self.generation_tokens += tokens
        if first:
            self.time_to_first_token.observe(seconds)
            self.classes[service_class].time_to_first_token.observe(seconds)
        else:
            self.inter_token.observe(seconds)

    def record_finished(self, request: Request, tokens: int, seconds: float, decode_seconds: float) -> None:
        """Count a generation that has ended by itself.

        Args:
            tokens: of the output. seconds: since its arrival. decode_seconds: since its first token.
        """
        self.prompt_tokens += request.prompt_tokens
        self.end_to_end.observe(seconds)
        self.classes[request.service_class].end_to_end.observe(seconds)
        if tokens > 1:
            self.per_output_token.observe(decode_seconds / (tokens - 1))


class PrometheusExporter(Collector):
    """The metrics page of one backend: the server's counters, and the schedulers' present state."""

    def __init__(self, stats: ServerStats, backend: Backend, model: str) -> None:
        self.stats = stats
        self.backend = backend
        self.model = model
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def text(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The client library's hook."""
        state = self.backend.state()
        tables = self._latencies(state), self._counts(state), self._speculation(state), self._of_classes()
        for kind, name, text, labels, rows in chain.from_iterable(tables):
            names = labels.split()
            family = kind(name, text, labels=["model_name", *names])
            for row in rows:
                family.add_metric([self.model, *row[: len(names)]], *row[len(names) :])
            yield family

    def _latencies(self, state: BackendState) -> Iterator[Table]:
        stats = self.stats
        per_token = "Time per output token of requests with two or more output tokens."
        for name, text, histogram in (
            ("time_to_first_token_seconds", FIRST + ".", stats.time_to_first_token),
            ("inter_token_latency_seconds", "Between an output token and the next.", stats.inter_token),
            ("request_time_per_output_token_seconds", per_token, stats.per_output_token),
            ("e2e_request_latency_seconds", END + ".", stats.end_to_end),
        ):
            yield HistogramMetricFamily, f"vllm:{name}", text, "", [histogram.row()]
        if steps := state.steps_by_models:
            by_models = Histogram(range(1, len(steps) + 1))
            by_models.counts[:-1] = steps
            by_models.total = sum(models * count for models, count in enumerate(steps, 1))
            text = "Models among the sequences of a decode step."
            yield HistogramMetricFamily, "serving_twin:models_per_decode_step", text, "", [by_models.row()]

    def _counts(self, state: BackendState) -> Iterator[Table]:
        stats, limits = self.stats, self.backend.limits
        for name, text, value in (
            ("num_requests_running", "Requests that are running or run in this step.", state.num_running),
            ("num_requests_waiting", "Requests that wait to be scheduled.", state.num_waiting),
            ("kv_cache_usage_perc", "Fraction of KV cache blocks in use, 0 to 1.", state.kv_cache_usage),
        ):
            yield GaugeMetricFamily, f"vllm:{name}", text, "", [(value,)]
        row = (str(limits.block_size), str(limits.num_gpu_blocks + NULL_BLOCKS), 1)
        text, labels = "The KV cache's settings, as labels.", "block_size num_gpu_blocks"
        yield GaugeMetricFamily, "vllm:cache_config_info", text, labels, [row]
        queries = state.prefill_tokens + state.cached_tokens
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", state.cached_tokens),
            ("num_preemptions", "Preemptions, whose KV cache is recomputed.", state.preemptions),
            ("generation_tokens", "Output tokens.", stats.generation_tokens),
            ("prompt_tokens", "Prompt tokens of finished requests.", stats.prompt_tokens),
        ):
            yield CounterMetricFamily, f"vllm:{name}", text, "", [(value,)]
        rows = [(reason, stats.reasons[reason]) for reason in get_args(FinishedReason)]
        yield CounterMetricFamily, "vllm:request_success", "Finished requests by reason.", "finished_reason", rows

    def _speculation(self, state: BackendState) -> Iterator[Table]:
        """Counters of draft tokens, where the engine speculates."""
        stats = state.speculation
        if stats is None:
            return
        for name, text, value in (
            ("drafts", "Decodes that verified draft tokens.", stats.num_drafts),
            ("draft_tokens", "Draft tokens that were verified.", stats.num_draft_tokens),
            ("accepted_tokens", "Draft tokens that were right.", stats.num_accepted_tokens),
        ):
            yield CounterMetricFamily, f"vllm:spec_decode_num_{name}", text, "", [(value,)]
        rows = [(str(position), count) for position, count in enumerate(stats.num_accepted_tokens_per_pos)]
        name, text = (
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were right, by position in the draft.",
        )
        yield CounterMetricFamily, name, text, "position", rows

    def _of_classes(self) -> Iterator[Table]:
        """Latencies by service class, where there are some, and what was shed."""
        classes = self.stats.classes
        if len(classes) > 1:
            for name, text, attribute in (
                ("time_to_first_token_seconds", FIRST, "time_to_first_token"),
                ("e2e_request_latency_seconds", END, "end_to_end"),
            ):
                rows = [(service_class, *getattr(stats, attribute).row()) for service_class, stats in classes.items()]
                name, text = f"serving_twin:class_{name}", f"{text}, by service class."
                yield HistogramMetricFamily, name, text, "service_class", rows
        shed = [(name, *item) for name, of_class in classes.items() for item in of_class.shed.items()]
        text, labels = "Requests shed, by the limit that was reached.", "service_class reason"
        yield CounterMetricFamily, "serving_twin:requests_shed", text, labels, shed
