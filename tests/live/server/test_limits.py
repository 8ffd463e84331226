"""Limits that protect the server, and the figures that it publishes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import hypothesis
import pytest
from prometheus_client.parser import text_string_to_metric_families

from live.models.decoder import Decoder
from live.server.launcher import OPERATIONS
from live.server.protocol import Operation
from live.server.replies import INVALID
from tests.live.server.conftest import Setting, config, running


def test_a_large_body_is_refused_announced_or_not(decoder: Decoder, folder: Path) -> None:
    with running(decoder, folder, max_body_mib=1000 / 2**20) as setting:
        client = setting.client
        assert client.post("/tokenize", prompt="x" * 900).status == 200
        assert client.post("/tokenize", prompt="x" * 1000).status == 413
        headers = {"content-type": "application/json", "transfer-encoding": "chunked"}
        chunks = b"".join(b"190\r\n" + b" " * 400 + b"\r\n" for _ in range(4)) + b"0\r\n\r\n"
        answer = client.send("POST", "/tokenize", chunks, headers)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")


def hold(setting: Setting, count: int, **parameters: object) -> list[threading.Thread]:
    """This many streams of the longest answer, under way."""
    started = [threading.Event() for _ in range(count)]

    def stream(event: threading.Event) -> None:
        fields = {"prompt": [1], "max_tokens": 250, "ignore_eos": True, **parameters}
        for _ in setting.client.events("/v1/completions", **fields):
            event.set()

    threads = [threading.Thread(target=stream, args=(event,)) for event in started]
    for thread in threads:
        thread.start()
    assert all(event.wait(10) for event in started)
    return threads


def test_too_many_at_once_and_too_long_a_queue(decoder: Decoder, folder: Path) -> None:
    small = config(max_num_seqs=2)
    with running(decoder, folder, engine=small, max_concurrency=3, max_queue=1) as setting:
        post = setting.client.post
        assert post("/v1/completions", prompt=[1], n=4).status == 400
        threads = hold(setting, 2)
        full = post("/v1/completions", prompt=[1], n=2)
        assert (full.status, full.headers["retry-after"], full.error["type"]) == (503, "1", "service_unavailable_error")
        assert "queue is full" in full.error["message"]
        third = threading.Thread(target=post, args=("/v1/completions",), kwargs={"prompt": [1], "max_tokens": 200})
        third.start()
        while setting.on_loop(lambda: len(setting.service.request_states)) < 3:
            time.sleep(0.005)
        crowded = post("/tokenize", prompt="a")
        assert (crowded.status, crowded.headers["retry-after"], crowded.error["type"]) == (429, "1", "rate_limit_error")
        assert setting.client.get("/health").status == 200
        for thread in (*threads, third):
            thread.join(20)
        assert post("/tokenize", prompt="a").status == 200
        assert setting.settled()


def test_a_key_is_wanted(decoder: Decoder, folder: Path) -> None:
    with running(decoder, folder, api_key="sésame") as setting:
        client = setting.client
        client.headers["authorization"] = "Bearer sésame".encode().decode("latin-1")
        assert client.post("/tokenize", prompt="a").status == 200
        assert client.get("/v1/models").status == 200
        for headers_sent in ({}, {"authorization": "Bearer other"}, {"authorization": "sésame"}):
            headers = {"content-type": "application/json", **headers_sent}
            for method, path in (("POST", "/tokenize"), ("GET", "/v1/models")):
                answer = client.send(method, path, b'{"prompt": "a"}' if method == "POST" else None, headers)
                assert (answer.status, answer.error["type"]) == (401, "authentication_error")
                assert answer.headers["www-authenticate"] == "Bearer"
            for path in ("/health", "/ping", "/version", "/metrics", "/openapi.json"):
                assert client.send("GET", path, None, headers).status == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "status"),
    [
        ("GET", "/nowhere", None, "", 404),
        ("GET", "/v1/completions", None, "", 405),
        ("DELETE", "/health", None, "", 405),
        ("POST", "/tokenize", b"{}", "text/plain", 415),
        ("POST", "/tokenize", b"{", "application/json", 400),
        ("POST", "/tokenize", b"", "application/json", 400),
        ("POST", "/tokenize", b"[1]", "application/json", 400),
        ("POST", "/tokenize", b"\xff\xfe", "application/json", 400),
        ("POST", "/tokenize", b'{"prompt": "\\ud800"}', "application/json", 400),
        ("POST", "/tokenize", b"[" * 100_000, "application/json", 400),
        ("POST", "/tokenize", b'{"prompt": "a", "model": "other"}', "application/json", 404),
        ("POST", "/detokenize", b'{"tokens": [99999]}', "application/json", 400),
        ("POST", "/v1/completions", b'{"prompt": [1], "temperature": NaN}', "application/json", 400),
        ("POST", "/v1/completions", b'{"prompt": [1], "temperature": 1e999}', "application/json", 400),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_have_a_status_and_openais_shape(
    server: Setting, method: str, path: str, body: bytes | None, kind: str, status: int
) -> None:
    answer = server.client.send(method, path, body, {"content-type": kind} if kind else {})
    assert answer.status == status
    assert answer.error.keys() == {"message", "type", "param", "code"}
    assert answer.error["message"]
    if status == 405:
        assert answer.headers["allow"] in ("POST", "GET")


def test_tokens_and_back(server: Setting) -> None:
    result = server.client.post("/tokenize", prompt="hé", return_token_strs=True).document
    assert (result["count"], result["max_model_len"]) == (3, 256)
    assert len(result["token_strs"]) == 3
    assert server.client.post("/detokenize", tokens=result["tokens"]).document == {"prompt": "hé"}
    (model,) = server.client.get("/v1/models").document["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 256)
    assert re.fullmatch(r"\d+\.\d+\.\d+", server.client.get("/version").document["version"])


def samples(setting: Setting) -> dict[str, float]:
    """The metrics page, by sample and what tells it from its like."""
    page = setting.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(page.body.decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            extra = sample.labels.get("finished_reason", sample.labels.get("le", ""))
            values[f"{sample.name}{'/' if extra else ''}{extra}"] = sample.value
    return values


def test_metrics_under_vllms_names(decoder: Decoder, folder: Path) -> None:
    with running(decoder, folder) as setting:
        parameters = {"max_tokens": 7, "ignore_eos": True}
        prompt = list(range(40))
        for _ in range(2):
            assert setting.client.post("/v1/completions", prompt=prompt, **parameters).status == 200
        setting.client.post("/v1/embeddings", input=[1, 2, 3])
        result = samples(setting)
        expected = {
            "vllm:generation_tokens_total": 14,
            "vllm:prompt_tokens_total": 83,
            "vllm:request_success_total/length": 2,
            "vllm:request_success_total/stop": 1,
            "vllm:request_success_total/abort": 0,
            "vllm:time_to_first_token_seconds_count": 2,
            "vllm:inter_token_latency_seconds_count": 12,
            "vllm:request_time_per_output_token_seconds_count": 2,
            "vllm:e2e_request_latency_seconds_count": 3,
            "vllm:prefix_cache_queries_total": 83,
            "vllm:prefix_cache_hits_total": 36,
            "vllm:num_preemptions_total": 0,
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": 0,
        }
        assert {name: result[name] for name in expected} == expected
        assert result["vllm:time_to_first_token_seconds_bucket/+Inf"] == 2
        assert 0 < result["vllm:inter_token_latency_seconds_sum"] < result["vllm:e2e_request_latency_seconds_sum"]
        threads = hold(setting, 2)
        busy = samples(setting)
        assert busy["vllm:num_requests_running"] == 2
        assert 0 < busy["vllm:kv_cache_usage_perc"] < 1
        for thread in threads:
            thread.join(20)


CHECKS = {"positive_data_acceptance": {"expected-statuses": ["2xx", "400", "404"]}}
"""400 too, since no schema can tell that a prompt and its answer fit the context; but not for what cannot be read."""

KEY = {"Authorization": "Bearer a-key"}
SETTINGS = hypothesis.settings(
    max_examples=hypothesis.settings().max_examples // 16, deadline=None, derandomize=True, database=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
)  # fmt: skip


@pytest.fixture(scope="module")
def schema(decoder: Decoder, folder: Path) -> Iterator[Any]:
    """The document of a server that wants a key."""
    schemathesis = pytest.importorskip("schemathesis", reason="the extra [test] has it")
    with running(decoder, folder, api_key="a-key", engine=config(num_gpu_blocks=16)) as setting:  # short contexts
        settings = schemathesis.Config.from_dict({"checks": CHECKS})
        yield schemathesis.openapi.from_url(f"{setting.client.base}/openapi.json", config=settings)
        assert setting.settled()


def drive(operation: Any, mode: Literal["positive", "negative"]) -> None:
    """Send what the document allows, or what it forbids, and check all that Schemathesis knows to check."""
    from schemathesis import GenerationMode

    @hypothesis.given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    @SETTINGS
    def holds(case: Any) -> None:
        response = case.call_and_validate(headers=KEY)
        if mode == "positive" and response.status_code == 400:
            assert response.json()["error"]["code"] != INVALID, "the schema allows what the server cannot read"

    holds()


FIRST_PATHS = {route.handler: route for route in reversed(OPERATIONS)}.values()
"""One path of each endpoint: the others are answered by the same function."""


@pytest.mark.parametrize("route", FIRST_PATHS, ids=lambda route: route.path)
def test_the_server_does_what_its_document_says(schema: Any, route: Operation) -> None:
    operation = schema[route.path][route.method]
    drive(operation, "positive")
    if route.body is not None:
        drive(operation, "negative")


def test_every_path_is_there(schema: Any) -> None:
    assert {(route.path, route.method.lower()) for route in OPERATIONS} == {
        (path, method) for path, operations in schema.raw_schema["paths"].items() for method in operations
    }
