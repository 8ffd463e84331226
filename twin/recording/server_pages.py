"""A live server as a client sees it: its metrics, as scrapes in Prometheus' text format, and its account of itself.

A run is a folder of metrics pages as the server wrote them, `metrics-<seconds since 1970>.prom`; `twin observe
--metrics` makes one, and `curl` does as well. Counters and histograms only grow, so differences of two pages are of the
time between them. Means are exact: sums over counts. Quantiles are known up to the buckets of a histogram.

vLLM says engine, version, model, device and settings at `/server_info`, which it has in development mode
(`VLLM_SERVER_DEV_MODE=1`); its metrics page has the KV cache's settings. SGLang says all at `/server_info`, which
earlier versions call `/get_server_info`.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from latency_models.io.files import builtin_name, read_text
from schedulers.engine_config import NULL_BLOCKS
from twin.recording.run_writer import require_empty
from workloads.errors import BadInput

IDLE_SECONDS = 600.0
"""Seconds without a byte after which a connection is given up."""


def key_headers() -> dict[str, str]:
    """The header with the key in OPENAI_API_KEY; none without one."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True)
class Upstream:
    """The place of a server: `https` or `http`, host, port, and a path before `/v1`."""

    secure: bool
    host: str
    port: int
    path: str = ""

    @classmethod
    def of(cls, url: str, flag: str) -> Upstream:
        expected = "expected a URL such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise BadInput(expected, field=flag, value=url) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise BadInput(expected, field=flag, value=url)
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(secure, parts.hostname, port or (443 if secure else 80), path)

    def connect(self, seconds: float = IDLE_SECONDS) -> http.client.HTTPConnection:
        """A new connection, not open yet."""
        if self.secure:
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=seconds, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=seconds)

    def get(self, path: str, headers: dict[str, str], seconds: float = 10.0) -> str:
        """The text of a page."""
        connection = self.connect(seconds)
        try:
            connection.request("GET", self.path + path, headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        except http.client.HTTPException as error:
            raise OSError(f"no HTTP response ({type(error).__name__})") from None
        finally:
            connection.close()
        if answer.status != 200:
            raise OSError(f"status {answer.status}")
        return text


def model_cards(server: Upstream, headers: dict[str, str], flag: str) -> list[dict[str, Any]]:
    """Entries of `/v1/models`, one for each model that a server offers; `id` is its name."""
    try:
        cards = json.loads(server.get("/v1/models", headers))["data"]
        return [{**card, "id": str(card["id"])} for card in cards]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"expected a server that answers /v1/models: {error}", field=flag,
                       value=f"{server.host}:{server.port}") from None  # fmt: skip


def published_settings(server: Upstream, headers: dict[str, str]) -> dict[str, Any]:
    """Cache settings in a server's metrics (vLLM's `cache_config_info`), by vLLM's names; empty without them."""
    try:
        return cache_settings(server.get("/metrics", headers))
    except OSError:
        return {}


WANTED = ("block_size", "num_gpu_blocks", "enable_prefix_caching", "gpu_memory_utilization")


def cache_settings(metrics: str) -> dict[str, Any]:
    """The settings in the labels of `cache_config_info`, in Prometheus' text format."""
    match = re.search(r"^vllm:cache_config_info\{([^}]*)\}", metrics, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', match[1])) if match else {}
    values = {name: _value(labels[name]) for name in WANTED if name in labels}
    return {name: value for name, value in values.items() if value is not None}


def _value(text: str) -> bool | int | float | None:
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return None


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

SGLANG_METRICS = {
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
                name = SGLANG_METRICS.get(name) or name.replace("sglang:", "vllm:", 1)
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
    """The requests that a server finished between two pages.

    `means`: `ttft.mean`, `itl.mean`, `tpot.mean`, `e2e.mean` (seconds), `prompt_tokens`, `output_tokens` (of a
    request), `step_tokens`, `output_throughput`, `request_throughput` (a second). `bounds`: a quantile's bucket.
    """

    finished: int
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
    means: dict[str, float] = {}
    bounds: dict[str, tuple[float, float]] = {}
    for name, families in HISTOGRAMS.items():
        family = next((histogram for histogram in families if growth.of(f"{histogram}_count")), None)
        if family is None:
            continue
        count = growth.of(f"{family}_count") or 1.0
        means[name if name.endswith("tokens") else f"{name}.mean"] = (growth.of(f"{family}_sum") or 0.0) / count
        if not name.endswith("tokens"):
            bounds |= {f"{name}.{quantile}": growth.bucket(family, share) for quantile, share in QUANTILES.items()}
    for name, counter in (("prompt_tokens", PROMPTS), ("output_tokens", OUTPUTS)):
        tokens = growth.of(counter)
        if tokens is not None:
            means.setdefault(name, tokens / finished)
    means["output_throughput"] = (growth.of(OUTPUTS) or 0.0) / growth.seconds
    means["request_throughput"] = finished / growth.seconds
    return Means(round(finished), means, bounds)


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


Engine = Literal["vLLM", "SGLang", "serving-twin"]

OWNERS: dict[str, Engine] = {"sglang": "SGLang", "serving-twin": "serving-twin"}
"""Engines by what `/v1/models` says of the owner; others have vLLM's pages."""

SGLANG_SETTINGS = {
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "page_size": "block_size",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "kv_cache_dtype": "cache_dtype",
    "quantization": "quantization",
}
"""vLLM's names of SGLang's settings."""

SECTIONS = ("model_config", "cache_config", "parallel_config", "scheduler_config")
"""Sections of vLLM's configuration whose fields are settings here."""


SECONDS = 60.0
"""Time limit for a page: vLLM collects its environment when `/server_info` is asked for, by programs that it runs."""


@dataclass(frozen=True)
class LiveServer:
    """What a server says of itself; "" where it does not publish `device` or `gpu` (by its name in the catalogue).

    `model`: its name for clients. `weights`: a repository or folder. `settings`: of the engine, by vLLM's names.
    """

    engine: Engine
    version: str
    model: str
    weights: str
    max_model_len: int | None
    device: str = ""
    gpu: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    page: Scrape | None = None

    @property
    def busy(self) -> int:
        """Requests that run or wait, by the metrics page."""
        return 0 if self.page is None else round(sum(self.page.values.get(name, 0.0) for name in (RUNNING, WAITING)))


def read_server(server: Upstream, headers: dict[str, str], model: str | None = None) -> LiveServer:
    """Ask a server for its models, settings and metrics; `BadInput` without it or without one model to take."""
    card = _card(server, headers, model)
    try:
        page = Scrape.of(Path("/metrics"), time.time(), server.get("/metrics", headers))
    except OSError:
        page = None
    engine = OWNERS.get(str(card.get("owned_by")), "vLLM")
    if engine == "SGLang":
        info = _json(server, "/server_info", headers) or _json(server, "/get_server_info", headers)
        return _sglang(card, info, page)
    info = _json(server, "/server_info?config_format=json", headers)
    config = info.get("vllm_config")
    settings = {} if page is None else dict(cache_settings(page.text))
    device = ""
    if isinstance(config, dict):
        settings = {key: value for name in SECTIONS for key, value in (config.get(name) or {}).items()}
        settings["scheduling_policy"] = settings.get("policy")
        device = str((config.get("device_config") or {}).get("device", ""))
    return LiveServer(
        engine,
        version=str(_json(server, "/version", headers).get("version", "")),
        model=str(card["id"]),
        weights=str(card.get("root") or card["id"]),
        max_model_len=card.get("max_model_len"),
        device=device,
        gpu=gpu_name(str((info.get("system_env") or {}).get("nvidia_gpu_models") or "")),
        settings={name: value for name, value in settings.items() if value is not None},
        page=page,
    )


def _sglang(card: Mapping[str, Any], info: Mapping[str, Any], page: Scrape | None) -> LiveServer:
    settings = {name: info[theirs] for theirs, name in SGLANG_SETTINGS.items() if info.get(theirs) is not None}
    states = info.get("internal_states") or [{}]
    if (running := states[0].get("effective_max_running_requests_per_dp")) is not None:
        settings["max_num_seqs"] = running
    if (tokens := info.get("max_total_num_tokens")) is not None:
        settings["num_gpu_blocks"] = tokens // settings.get("block_size", 1) + NULL_BLOCKS
    settings |= {
        "enable_prefix_caching": not info.get("disable_radix_cache", False),
        "async_scheduling": not info.get("disable_overlap_schedule", False),
        "enable_expert_parallel": info.get("ep_size", 1) > 1,
    }
    return LiveServer(
        "SGLang", str(info.get("version", "")), str(card["id"]), str(info.get("model_path") or card["id"]),
        card.get("max_model_len") or info.get("context_length"), str(info.get("device") or ""), "", settings, page,
    )  # fmt: skip


def gpu_name(text: str) -> str:
    """The device of the hardware catalogue that a driver's name has in it (`NVIDIA H100 80GB HBM3`); "" for none."""
    words = re.findall(r"\b[a-z]+\d+[a-z]*\b", text.lower())
    return next((name for word in words if (name := builtin_name("hardware", word))), "")


def _card(server: Upstream, headers: dict[str, str], model: str | None) -> Mapping[str, Any]:
    """The entry of `/v1/models` of a model."""
    cards = model_cards(server, headers, "URL")
    bases = [card for card in cards if not card.get("parent")]  # others are its adapters
    if model is None and len(bases) == 1:
        return bases[0]
    names = [card["id"] for card in cards]
    if (model or "") not in names and (model or len(names) != 1):
        offered = ", ".join(names) or "none: the server offers none"
        raise BadInput(f"expected one of {offered}", field="--model", value=model)
    return cards[names.index(model) if model else 0]


def _json(server: Upstream, path: str, headers: dict[str, str]) -> dict[str, Any]:
    """A JSON object of the server; empty where it has no such page."""
    try:
        document = json.loads(server.get(path, headers, SECONDS))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
