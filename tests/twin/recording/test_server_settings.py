"""What a server says of itself: pages of a vLLM 0.32 on a CPU, and those that SGLang 0.5.23 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.twin.recording.server import answering
from twin.recording.server_pages import LiveServer, Upstream, gpu_name, read_server
from workloads.errors import BadInput

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
