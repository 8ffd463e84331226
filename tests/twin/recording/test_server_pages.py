"""A server's account of itself, and of the time between two of its pages of metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.twin.recording.server import METRICS, Answering, answering
from twin import cli
from twin.recording.server_pages import (
    FINISHED,
    LiveServer,
    Scrape,
    Upstream,
    between,
    gpu_name,
    is_scrapes,
    mean_gauges,
    read_scrapes,
    read_server,
    record_scrapes,
)
from workloads.errors import BadInput

PAGE = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",\
gpu_memory_utilization="0.9",num_gpu_blocks="27432",sliding_window="None"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m/a"} {running}
vllm:num_requests_running{engine="1",model_name="m/a"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m/a"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m/a"} 0.25
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m/a"} {prompts}
# HELP vllm:prompt_tokens_created Number of prefill tokens processed.
vllm:prompt_tokens_created{engine="0",model_name="m/a"} 1.7638848e+09
vllm:generation_tokens_total{engine="0",model_name="m/a"} {outputs}
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m/a"} {stopped}
vllm:request_success_total{engine="0",finished_reason="length",model_name="m/a"} 2.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m/a"} 0.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m/a"} {few}
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="m/a"} {many}
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="m/a"} {all}
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m/a"} {all}
vllm:time_to_first_token_seconds_count{engine="0",model_name="m/a"} {all}
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m/a"} {ttft}
vllm:{itl}_bucket{engine="0",le="0.025",model_name="m/a"} {outputs}
vllm:{itl}_bucket{engine="0",le="+Inf",model_name="m/a"} {outputs}
vllm:{itl}_count{engine="0",model_name="m/a"} {outputs}
vllm:{itl}_sum{engine="0",model_name="m/a"} {decoding}
"""

FIRST = {"running": 1.0, "prompts": 1e3, "outputs": 400.0, "stopped": 6.0, "few": 8, "many": 8, "all": 8, "ttft": 0.4}
LAST = {"running": 5.0, "prompts": 9e3, "outputs": 2400.0, "stopped": 16.0, "few": 9, "many": 17, "all": 18}


def page(itl: str = "inter_token_latency_seconds", **values: Any) -> str:
    """A page as vLLM's with these numbers; braces of labels stay."""
    text = PAGE
    for name, value in {"itl": itl, **values}.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def scrapes(folder: Path, itl: str = "inter_token_latency_seconds") -> list[Scrape]:
    (folder / "metrics-1763884800.250.prom").write_text(page(itl, **FIRST, decoding=8.0))
    (folder / "metrics-1763884840.25.prom").write_text(page(itl, **LAST, ttft=2.4, decoding=48.0))
    return read_scrapes(folder)


@pytest.mark.parametrize("itl", ["inter_token_latency_seconds", "time_per_output_token_seconds"])
def test_differences_of_two_pages_by_hand(tmp_path: Path, itl: str) -> None:
    """10 requests in 40 s: 2 s of waiting in all, 40 s for 2,000 tokens, the first names and those of old versions."""
    first, last = scrapes(tmp_path, itl)
    difference = between(first, last)
    assert difference.finished == 10
    assert difference.means == pytest.approx({
        "ttft.mean": 0.2, "itl.mean": 0.02, "prompt_tokens": 800.0, "output_tokens": 200.0, "output_throughput": 50.0,
        "request_throughput": 0.25,
    })  # fmt: skip
    # One of ten below 0.1 s, nine below 0.25: the fifth is between them, the tenth above.
    assert difference.bounds["ttft.p50"] == (0.1, 0.25)
    assert difference.bounds["ttft.p99"] == (0.25, 0.5)
    assert difference.bounds["itl.p99"] == (0.0, 0.025)
    assert mean_gauges([first, last]) == {"running": 6.0, "waiting": 0.0, "kv_cache_usage": 0.25}
    assert last.values[FINISHED] == 18.0  # of all reasons


def test_a_quantile_above_the_last_bound_has_no_upper_edge(tmp_path: Path) -> None:
    first, last = scrapes(tmp_path)
    slow = page(**{**LAST, "all": 17}, ttft=2.4, decoding=48.0).replace(
        'le="+Inf",model_name="m/a"} 17', 'le="+Inf",model_name="m/a"} 18'
    )
    assert between(first, Scrape.of(last.source, last.at, slow)).bounds["ttft.p99"] == (0.5, math.inf)


def test_a_restarted_server_and_an_idle_one_are_refused(tmp_path: Path) -> None:
    first, last = scrapes(tmp_path)
    with pytest.raises(BadInput, match=r"request_success_total: expected a count that grows: the server was restarted"):
        between(Scrape.of(first.source, first.at, last.text), Scrape.of(last.source, last.at, first.text))
    idle = Scrape.of(last.source, last.at, first.text)
    with pytest.raises(BadInput, match=r"got 0, expected requests that finished between two pages"):
        between(first, idle)
    with pytest.raises(BadInput, match="expected a later page"):
        between(first, first)


@pytest.mark.parametrize("line", ["vllm:x{", "vllm:x{a=\"b\"} many", 'vllm:x_bucket{engine="0"} 3', "1 2"])  # fmt: skip
def test_a_line_that_is_no_sample_is_told(tmp_path: Path, line: str) -> None:
    with pytest.raises(BadInput, match=r"m\.prom:2: got .*, expected a sample in Prometheus' text format"):
        Scrape.of(tmp_path / "m.prom", 0.0, f"ok 1\n{line}\n")


def test_samples_with_escapes_exponents_and_instants_are_read(tmp_path: Path) -> None:
    text = 'a{path="C:\\\\x \\"y\\" }"} 1e3 1763884800000\nb NaN\nc{} +Inf\n'
    values = Scrape.of(tmp_path / "m", 0.0, text).values
    assert (values["a"], values["c"]) == (1000.0, math.inf)
    assert math.isnan(values["b"])


def test_fewer_than_two_pages_are_refused(tmp_path: Path) -> None:
    assert not is_scrapes(tmp_path)
    (tmp_path / "metrics-1.prom").write_text(METRICS)
    assert is_scrapes(tmp_path)
    with pytest.raises(BadInput, match=r"expected at least two files metrics-<seconds since 1970>\.prom"):
        read_scrapes(tmp_path)


def test_pages_are_read_until_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering() as (port, _):
        words = ["--every", "0.05", "--duration", "0.12", "-o", str(tmp_path / "run")]
        assert cli.run(["observe", "--metrics", f"http://127.0.0.1:{port}/metrics", *words]) == 0
    scrapes = read_scrapes(tmp_path / "run")
    assert len(scrapes) >= 2
    assert all(scrape.text == METRICS for scrape in scrapes)
    assert scrapes[-1].at - scrapes[0].at >= 0.1
    assert f"{len(scrapes)} pages in" in capsys.readouterr().err


def test_ctrl_c_reads_a_last_page(tmp_path: Path) -> None:
    def interrupted(seconds: float) -> None:
        assert seconds == 7.0
        raise KeyboardInterrupt

    with answering() as (port, _):
        server = Upstream.of(f"127.0.0.1:{port}", "--metrics")
        pages = record_scrapes(server, tmp_path / "run", {}, every=7.0, duration=None, sleep=interrupted)
    assert pages == len(list((tmp_path / "run").iterdir())) == 2


def test_a_server_that_stops_leaves_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = iter([(200, METRICS.encode(), "text/plain"), (503, b"stopping", "text/plain")])
    monkeypatch.setattr(Answering, "do_GET", lambda self: self._whole(*next(pages)))
    with answering() as (port, _):
        words = ["--every", "0.01", "-o", str(tmp_path / "run")]
        assert cli.run(["observe", "--metrics", f"127.0.0.1:{port}", *words]) == 1
    assert "the server stopped answering (status 503)" in capsys.readouterr().err
    assert len(list((tmp_path / "run").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metrics", "x:1", "--upstream", "x:1"], "--upstream: got 'x:1', expected either this, or --spans"),
        (["--metrics", "x:1", "--every", "0"], "--every: got 0.0, expected seconds above 0"),
        (["--metrics", "127.0.0.1:1"], "--metrics: got '127.0.0.1:1', expected a server that answers /metrics"),
    ],
)
def test_bad_questions_of_metrics_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["observe", *words, "-o", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.strip().splitlines()[-1].count("expected") == 1


PAGES = Path(__file__).parent / "pages"
VLLM, SGLANG = (json.loads((PAGES / f"{name}.json").read_text()) for name in ("vllm-0.32", "sglang-0.5.23"))


def read(pages: dict[str, Any], model: str | None = None) -> LiveServer:
    with answering(pages) as (port, _):
        return read_server(Upstream.of(f"127.0.0.1:{port}", "URL"), {}, model)


def test_vllm_says_all_in_development_mode() -> None:
    server = read(VLLM)
    assert (server.engine, server.version, server.device, server.gpu) == ("vLLM", "0.32.0", "cpu", "")
    assert (server.model, server.weights, server.max_model_len, server.busy) == ("model", "model", 1024, 0)
    assert server.settings.items() >= {
        "max_num_seqs": 16, "max_num_batched_tokens": 256, "block_size": 32, "num_gpu_blocks": 2048,
        "async_scheduling": False, "tensor_parallel_size": 1, "scheduling_policy": "fcfs",
    }.items()  # fmt: skip


def test_vllm_has_its_cache_on_the_metrics_page_otherwise() -> None:
    server = read({path: page for path, page in VLLM.items() if not path.startswith("/server_info")})
    assert (server.version, server.device) == ("0.32.0", "")
    assert server.settings == {
        "block_size": 32, "num_gpu_blocks": 2048, "enable_prefix_caching": True, "gpu_memory_utilization": 0.92,
    }  # fmt: skip
    assert read({"/v1/models": VLLM["/v1/models"]}).page is None


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_sglang_by_vllms_names(path: str) -> None:
    pages = {path if key == "/server_info" else key: page for key, page in SGLANG.items()}
    server = read(pages)
    assert (server.engine, server.version, server.device, server.busy) == ("SGLang", "0.5.23", "cuda", 4)
    assert server.settings == {
        "max_num_seqs": 512, "max_num_batched_tokens": 8192, "block_size": 16, "num_gpu_blocks": 25001,
        "tensor_parallel_size": 4, "pipeline_parallel_size": 1, "data_parallel_size": 1, "cache_dtype": "fp8_e4m3",
        "quantization": "fp8", "enable_prefix_caching": True, "async_scheduling": True,
        "enable_expert_parallel": False,
    }  # fmt: skip
    assert server.page.values["vllm:time_to_first_token_seconds_count"] == 12


def test_the_base_model_is_taken_where_the_others_are_its_adapters() -> None:
    (card,) = VLLM["/v1/models"]["data"]
    adapter = {**card, "id": "adapter", "parent": "model"}
    pages = {**VLLM, "/v1/models": {"data": [adapter, card]}}
    assert read(pages).model == "model"
    assert read(pages, "adapter").model == "adapter"
    twins = {**VLLM, "/v1/models": {"data": [card, {**card, "id": "second"}]}}
    with pytest.raises(BadInput, match="--model: expected one of model, second"):
        read(twins)
    with pytest.raises(BadInput, match="--model: got 'third', expected one of model, second"):
        read(twins, "third")


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("GPU 0: NVIDIA H100 80GB HBM3\nGPU 1: NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("GPU 0: NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("GPU 0: NVIDIA L40S", "l40s"),
        ("GPU 0: NVIDIA GB200", "gb200"),
        ("GPU 0: NVIDIA GeForce RTX 3090", ""),
        ("", ""),
    ],
)
def test_a_drivers_name_is_one_of_the_catalogue(driver: str, name: str) -> None:
    assert gpu_name(driver) == name
