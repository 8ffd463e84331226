"""Scrapes of a server's metrics page, in Prometheus' text format: what happened between two of them.

A run is a folder of pages as the server wrote them, `metrics-<seconds since 1970>.prom`; `twin observe --metrics` makes
one, and `curl` does as well. Counters and histograms only grow, so differences of two pages are of the time between
them. Means are exact: sums over counts. Quantiles are known up to the buckets of a histogram.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from latency_models.io.files import read_text
from twin.recording.run_writer import require_empty
from twin.recording.upstream import Upstream
from workloads.errors import BadInput

FILE = re.compile(r"metrics-(\d+(?:\.\d+)?)\.prom")

HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds",),
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "tpot": ("vllm:request_time_per_output_token_seconds",),
    "e2e": ("vllm:e2e_request_latency_seconds",),
    "prompt_tokens": ("vllm:request_prompt_tokens",),
    "output_tokens": ("vllm:request_generation_tokens",),
    "step_tokens": ("vllm:iteration_tokens_total",),
}
"""Histograms of vLLM's page by our names; the second name of one is that of earlier versions."""

PROMPTS, OUTPUTS, FINISHED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"
CACHED = "vllm:prefix_cache_hits_total"
RUNNING, WAITING, CACHE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"

SGLANG = {
    "sglang:num_requests_total": FINISHED,
    "sglang:num_running_reqs": RUNNING,
    "sglang:num_queue_reqs": WAITING,
    "sglang:token_usage": CACHE,
}
"""vLLM's names of SGLang's metrics that are called otherwise there; the others differ in what is before the colon."""

QUANTILES = {"p50": 0.5, "p99": 0.99}

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Scrape:
    """One page at a time (seconds since 1970): samples by vLLM's names, summed over labels, and cumulative buckets."""

    source: Path
    at: float
    text: str
    values: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]

    @classmethod
    def of(cls, source: Path, at: float, text: str) -> Scrape:
        """Read a page."""
        values: dict[str, float] = {}
        buckets: dict[str, dict[float, float]] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            match = _SAMPLE.fullmatch(line)
            try:
                name, labels, value = match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])  # type: ignore[index]
                name = SGLANG.get(name) or name.replace("sglang:", "vllm:", 1)
                if name.endswith("_bucket"):
                    counts = buckets.setdefault(name.removesuffix("_bucket"), {})
                    edge = float(labels["le"])
                    counts[edge] = counts.get(edge, 0.0) + value
                else:
                    values[name] = values.get(name, 0.0) + value
            except (TypeError, ValueError, KeyError):
                expected = "expected a sample in Prometheus' text format"
                raise BadInput(expected, value=line[:60], file=source, line=number) from None
        return cls(source, at, text, values, buckets)


@dataclass(frozen=True)
class Means:
    """The work of a server between two pages: seconds, requests that ended, observations of each histogram.

    `means`: `ttft.mean`, `itl.mean`, `tpot.mean`, `e2e.mean` (seconds), `prompt_tokens`, `output_tokens` (of a
    request), `step_tokens`, `output_throughput`, `request_throughput` (a second). `bounds`: a quantile's bucket.
    """

    seconds: float
    finished: int
    counts: Mapping[str, int]
    means: Mapping[str, float]
    bounds: Mapping[str, tuple[float, float]]


def is_scrapes(run: Path) -> bool:
    """True for a folder with pages."""
    return run.is_dir() and any(FILE.fullmatch(file.name) for file in run.iterdir())


def read_scrapes(folder: Path, since: float = 0.0) -> list[Scrape]:
    """The pages of a folder, in order of time. `since`: seconds since 1970 before which pages are left out."""
    pages = []
    for file in folder.iterdir():
        if (match := FILE.fullmatch(file.name)) and float(match[1]) >= since:
            pages.append(Scrape.of(file, float(match[1]), read_text(file)))
    if len(pages) < 2:
        raise BadInput("expected at least two files metrics-<seconds since 1970>.prom", file=folder)
    return sorted(pages, key=lambda scrape: scrape.at)


def between(first: Scrape, last: Scrape) -> Means:
    """Means of the time between two pages."""
    growth = Growth(first, last)
    finished = growth.of(FINISHED)
    if not finished:
        expected = f"expected requests that finished between two pages ({FINISHED})"
        raise BadInput(expected, value=finished or 0, file=last.source)
    counts: dict[str, int] = {}
    means: dict[str, float] = {}
    bounds: dict[str, tuple[float, float]] = {}
    for name, families in HISTOGRAMS.items():
        family = next((histogram for histogram in families if growth.of(f"{histogram}_count")), None)
        if family is None:
            continue
        count = growth.of(f"{family}_count") or 1.0
        counts[name] = round(count)
        means[name if name.endswith("tokens") else f"{name}.mean"] = (growth.of(f"{family}_sum") or 0.0) / count
        if not name.endswith("tokens"):
            bounds |= {f"{name}.{quantile}": growth.bucket(family, share) for quantile, share in QUANTILES.items()}
    for name, counter in (("prompt_tokens", PROMPTS), ("output_tokens", OUTPUTS)):
        tokens = growth.of(counter)
        if tokens is not None:
            means.setdefault(name, tokens / finished)
    means["output_throughput"] = (growth.of(OUTPUTS) or 0.0) / growth.seconds
    means["request_throughput"] = finished / growth.seconds
    return Means(growth.seconds, round(finished), counts, means, bounds)


class Growth:
    """Differences of two pages."""

    def __init__(self, first: Scrape, last: Scrape) -> None:
        self._first = first
        self._last = last
        self.seconds = last.at - first.at
        if not self.seconds > 0:
            raise BadInput("expected a later page than the one before", file=last.source)

    def of(self, name: str) -> float | None:
        """The growth of a count; None if the page has no such count."""
        if name not in self._last.values:
            return None
        growth = self._last.values[name] - self._first.values.get(name, 0.0)
        if growth < 0:
            raise BadInput("expected a count that grows: the server was restarted", field=name, file=self._last.source)
        return growth

    def bucket(self, family: str, share: float) -> tuple[float, float]:
        """The edges of the bucket with the observation of rank ⌈share · n⌉."""
        before, after = (page.buckets.get(family, {}) for page in (self._first, self._last))
        counts = {edge: after[edge] - before.get(edge, 0.0) for edge in sorted(after)}
        rank, low = math.ceil(share * max(counts.values(), default=0.0)), 0.0
        for edge, count in counts.items():
            if count >= rank:
                return low, edge
            low = edge
        return low, math.inf


def mean_gauges(scrapes: Sequence[Scrape]) -> dict[str, float]:
    """Requests that run and wait, and the share of the KV cache in use, averaged over pages that have them."""
    means = {}
    for name, gauge in (("running", RUNNING), ("waiting", WAITING), ("kv_cache_usage", CACHE)):
        values = [scrape.values[gauge] for scrape in scrapes if gauge in scrape.values]
        if values:
            means[name] = sum(values) / len(values)
    return means


def record_scrapes(
    server: Upstream,
    folder: Path,
    headers: Mapping[str, str],
    *,
    every: float,
    duration: float | None,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Write a page each `every` seconds and at the end (after `duration`, or on Ctrl-C); returns their number."""
    require_empty(folder, "--output")
    folder.mkdir(parents=True, exist_ok=True)
    started, pages = time.monotonic(), 1
    try:
        write_page(server, folder, headers)
    except OSError as error:
        expected = f"expected a server that answers /metrics: {error}"
        raise BadInput(expected, field="--metrics", value=f"{server.host}:{server.port}") from None
    try:
        while duration is None or (remaining := started + duration - time.monotonic()) > 0:
            sleep(every if duration is None else min(every, remaining))
            write_page(server, folder, headers)
            pages += 1
    except KeyboardInterrupt:
        write_page(server, folder, headers)
        pages += 1
    return pages


def write_page(server: Upstream, folder: Path, headers: Mapping[str, str]) -> Scrape:
    """Add the server's page of now to a folder."""
    text = server.get("/metrics", dict(headers))
    now = time.time()
    file = folder / f"metrics-{now:.6f}.prom"
    file.write_text(text, encoding="utf-8")
    return Scrape.of(file, now, text)
