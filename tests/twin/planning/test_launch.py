"""launch.sh launches what was planned. It is run here, with a stand-in for vLLM that records its arguments."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

import twin
from tests.twin.planning.scenarios import document, kind
from twin.cli import run
from twin.planning.given import moved
from twin.planning.launch import SGLANG, deployment_of, launch_commands
from twin.planning.manifests import compose, dynamo, llm_d

FLAGS = Path(__file__).parent / "flags"


def recorded(name: str) -> tuple[set[str], set[str]]:
    """The flags of a program, and those of them that are true or false and have a form that begins with --no-."""
    words = [
        word for line in (FLAGS / f"{name}.txt").read_text().splitlines() if line[0] != "#" for word in line.split()
    ]
    return {word.rstrip("*") for word in words}, {word.rstrip("*") for word in words if word.endswith("*")}


KNOWN = {name: recorded(name) for name in ("vllm-0.32", "sglang-0.5.23", "vllm-router-0.1.17", "sglang-router-0.3.2")}
QUANTIZATIONS = {"fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "modelopt", "compressed-tensors"}

STAND_IN = """\
#!/usr/bin/env python3
import json, os, sys
names = ("CUDA_VISIBLE_DEVICES", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")
environment = {name: os.environ[name] for name in names if name in os.environ}
with open(os.path.join(os.environ["RECORDS"], f"{os.getpid()}.json"), "w") as file:
    json.dump({"argv": sys.argv, "environment": environment}, file)
"""


def launched(script: str, folder: Path, **environment: str) -> list[dict[str, Any]]:
    """Run a script and return what it started: `words` after the program, flags with their values, and environment."""
    records = folder / "records"
    records.mkdir(exist_ok=True)
    for old in records.iterdir():
        old.unlink()
    for name in ("vllm", "python", "vllm-router"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    (folder / "launch.sh").write_text(script)
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(
        ["sh", str(folder / "launch.sh")], check=True, timeout=60,
        env={"PATH": path, "RECORDS": str(records), **environment},
    )  # fmt: skip
    programs = []
    for file in records.iterdir():
        record = json.loads(file.read_text())
        words, flags = record["argv"][1:], {}
        for i, word in enumerate(words):
            if word.startswith("--"):
                values = words[i + 1 : next((j for j in range(i + 1, len(words)) if words[j].startswith("--")), None)]
                flags[word] = " ".join(values)
        program = Path(record["argv"][0]).name
        programs.append({"program": program, "words": words, "flags": flags, "environment": record["environment"]})
    return sorted(programs, key=lambda record: int(record["flags"]["--port"]))


def roofline(model: str, width: int, **fields: Any) -> dict[str, Any]:
    return {"source": "roofline", "model": model, "hardware": "h200-sxm", "tensor_parallel": width, **fields}


def pool(name: str, step_time: dict[str, Any], count: int, replicas: int = 1, **engine: Any) -> dict[str, Any]:
    role, device = name if name in ("prefill", "decode") else "both", {"type": "h200-sxm", "count": count}
    section = {"name": name, "role": role, "replicas": replicas, "engine": engine, "step_time": step_time}
    return {**section, "device": device}


def check_flags(flags: Iterable[str], name: str = "vllm-0.32") -> None:
    known, switches = KNOWN[name]
    for flag in flags:
        assert flag in known or flag.replace("--no-", "--") in switches, flag


@pytest.mark.parametrize(
    ("engine", "flag", "value"),
    [
        ({"max_num_seqs": 77}, "--max-num-seqs", "77"),
        ({"max_num_batched_tokens": 4096}, "--max-num-batched-tokens", "4096"),
        ({"block_size": 32}, "--block-size", "32"),
        ({"num_gpu_blocks": 5000}, "--num-gpu-blocks-override", "5001"),
        ({}, "--gpu-memory-utilization", "0.9"),  # vLLM 0.32 has 0.92
        ({"kv_memory": {"gpu_memory_utilization": 0.8}}, "--gpu-memory-utilization", "0.8"),
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching", ""),
        ({}, "--enable-prefix-caching", ""),
        ({"scheduling_policy": "priority"}, "--scheduling-policy", "priority"),
        ({"async_scheduling": True}, "--async-scheduling", ""),
        ({}, "--no-async-scheduling", ""),  # on by default in vLLM
        ({}, "--scheduler-reserve-full-isl", ""),
        ({"scheduler_reserve_full_isl": False}, "--no-scheduler-reserve-full-isl", ""),
        ({"enable_chunked_prefill": False}, "--no-enable-chunked-prefill", ""),
        ({"long_prefill_token_threshold": 512}, "--long-prefill-token-threshold", "512"),
        ({"watermark": 0.01}, "--watermark", "0.01"),
        ({"max_num_active_seqs": 64}, "--max-num-active-seqs", "64"),
        ({"prefill_schedule_interval": 4}, "--prefill-schedule-interval", "4"),
        ({"lora_config": {"max_loras": 3, "max_lora_rank": 32, "max_cpu_loras": 9}}, "--max-cpu-loras", "9"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size", "2"),
        ({"data_parallel_size": 2}, "--data-parallel-size", "2"),
    ],
)
def test_each_setting_is_a_flag_that_vllm_has(engine: dict[str, Any], flag: str, value: str, tmp_path: Path) -> None:
    system = {"pools": [pool("engine", roofline("llama-3.3-70b", 2), 4, **engine)]}
    (started,) = launched(launch_commands(system, tmp_path), tmp_path)
    check_flags(started["flags"])
    assert started["flags"].get("--quantization", "fp8") in QUANTIZATIONS
    assert started["flags"][flag] == value
    assert started["flags"]["--tensor-parallel-size"] == "2"


@pytest.mark.parametrize(
    ("step_time", "words"),
    [
        (roofline("llama-3.3-70b", 2), ["meta-llama/Llama-3.3-70B-Instruct"]),
        (roofline("llama-3.3-70b", 2, weights="fp8"), ["RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic"]),
        (roofline("nvidia/Llama-3.3-70B-Instruct-FP8", 2), ["nvidia/Llama-3.3-70B-Instruct-FP8"]),
        (roofline("mixtral-8x22b", 8, weights="fp8"),
         ["mistralai/Mixtral-8x22B-Instruct-v0.1", "--quantization", "fp8_per_tensor"]),
        (roofline("gpt-oss-120b", 1), ["openai/gpt-oss-120b"]),
        (roofline("deepseek-ai/DeepSeek-R1", 8), ["deepseek-ai/DeepSeek-R1"]),
        (roofline("deepseek-v3", 8, experts="fp4", weights="bf16"), ["nvidia/DeepSeek-V3.1-NVFP4"]),
        (roofline("llama-3.2-1b", 1, weights="int8"), ["MINE"]),  # which nobody publishes: asked for
    ],
)  # fmt: skip
def test_the_weights_are_those_that_were_planned(step_time: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    script = launch_commands({"pools": [pool("engine", step_time, step_time["tensor_parallel"])]}, tmp_path)
    (started,) = launched(script, tmp_path, MODEL="MINE")
    assert started["words"][1 : 1 + len(words)] == words
    assert ("--quantization" in started["flags"]) == ("--quantization" in words)
    plain = words == ["meta-llama/Llama-3.3-70B-Instruct"]  # others may come with scales of an FP8 cache
    assert started["flags"]["--kv-cache-dtype"] == ("auto" if plain else "bfloat16")
    assert ("MODEL" in script) == (words == ["MINE"])


def test_a_folder_of_weights_is_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9}
    config = {"model_type": "llama", "intermediate_size": 8, **sizes, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine" / "model.safetensors").touch()
    tables = {"source": "kernel_tables", "path": "tables", "model": "./mine"}
    cases = [(roofline("./mine", 1), "mine"), (roofline("./mine", 1, weights="bf16"), "other"), (tables, "mine")]
    for step_time, word in cases:
        system = {"pools": [pool("engine", step_time, 1)]}
        (started,) = launched(launch_commands(system, tmp_path), tmp_path, MODEL="other")
        assert started["words"][1] == word
    config["quantization_config"] = {"quant_method": "awq"}  # which has no step times, but is served
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    (started,) = launched(launch_commands({"pools": [pool("engine", tables, 1)]}, tmp_path), tmp_path)
    assert started["words"][1] == "mine"


def test_prefill_and_decode_apart_have_a_router_in_front(tmp_path: Path) -> None:
    prefill, decode = roofline("qwen3-14b", 2), roofline("qwen3-14b", 4, cache="fp8")
    system = {"pools": [pool("prefill", prefill, 2, 2), pool("decode", decode, 4, 3)]}
    script = launch_commands(system, tmp_path)
    hosts = {"HOST_1": "one", "HOST_2": "two"}
    first, second = (launched(script, tmp_path, MACHINE=str(i), **hosts) for i in (1, 2))
    router, *engines = first[0], *first[1:], *second
    assert router["program"] == "vllm-router"
    assert router["words"][-11:] == [
        "--vllm-pd-disaggregation", "--prefill", "http://one:8100", "--prefill", "http://one:8101",
        "--decode", "http://one:8102", "--decode", "http://two:8103", "--decode", "http://two:8104",
    ]  # fmt: skip
    check_flags(router["flags"], "vllm-router-0.1.17")
    assert [record["flags"]["--port"] for record in engines] == ["8100", "8101", "8102", "8103", "8104"]
    gpus = [record["environment"]["CUDA_VISIBLE_DEVICES"] for record in engines]
    assert gpus == ["0,1", "2,3", "4,5,6,7", "0,1,2,3", "4,5,6,7"]
    assert [record["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] for record in engines] == ["one"] * 3 + ["two"] * 2
    assert len({record["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for record in engines}) == 5
    for record in engines:
        check_flags(record["flags"])
        assert json.loads(record["flags"]["--kv-transfer-config"])["kv_connector"] == "NixlConnector"
    assert {record["flags"]["--kv-cache-dtype"] for record in engines} == {"auto", "fp8"}


EVERYTHING = {
    "max_num_seqs": 77, "max_num_batched_tokens": 4096, "num_gpu_blocks": 5000, "scheduling_policy": "priority",
    "enable_prefix_caching": False, "data_parallel_size": 2,
    "lora_config": {"max_loras": 3, "max_lora_rank": 32, "max_cpu_loras": 9},
}  # fmt: skip


@pytest.mark.parametrize(("value", "on"), [(True, True), (8, True), (1, False), (False, False), (None, False)])
def test_experts_that_are_spread_are_in_the_command(value: bool | int | None, on: bool, tmp_path: Path) -> None:
    """Sources say it by true, or by the number of devices that have them."""
    step_time = roofline("deepseek-ai/DeepSeek-R1", 8, expert_parallel=value)
    assert ("--enable-expert-parallel" in launch_commands({"pools": [pool("engine", step_time, 8)]}, tmp_path)) == on


def test_sglang_starts_what_was_planned(tmp_path: Path) -> None:
    sparse = roofline("deepseek-ai/DeepSeek-R1", 4, expert_parallel=True, data_parallel=2, cache="fp8")
    system = {"pools": [pool("engine", sparse, 8, **EVERYTHING)]}
    (engine,) = launched(launch_commands(system, tmp_path, program=SGLANG), tmp_path)
    assert engine["words"][:6] == [
        "-m", "sglang.launch_server", "--host", "0.0.0.0", "--model-path", "deepseek-ai/DeepSeek-R1",
    ]  # fmt: skip
    check_flags(engine["flags"], "sglang-0.5.23")
    assert engine["flags"].items() >= {
        "--tp-size": "8", "--attn-dp-size": "2", "--ep-size": "8", "--max-running-requests": "77",
        "--chunked-prefill-size": "4096", "--page-size": "16", "--max-total-tokens": "80000",
        "--kv-cache-dtype": "fp8_e4m3", "--enable-priority-scheduling": "", "--disable-radix-cache": "",
        "--disable-overlap-schedule": "", "--enable-mixed-chunk": "", "--max-loaded-loras": "9",
    }.items()  # fmt: skip
    pools = [pool(role, roofline("qwen3-14b", 2), 2, 2, watermark=0.01) for role in ("prefill", "decode")]
    script = launch_commands({"pools": pools}, tmp_path, program=SGLANG)
    assert "# SGLang has no flag, or another form, for watermark.\n" in script
    router, *engines = launched(script, tmp_path)
    assert router["words"][-11:] == [
        "--pd-disaggregation", "--prefill", "http://localhost:8100", "5600", "--prefill", "http://localhost:8101",
        "5601", "--decode", "http://localhost:8102", "--decode", "http://localhost:8103",
    ]  # fmt: skip
    check_flags(router["flags"], "sglang-router-0.3.2")
    sides = ("--disaggregation-mode", "--disaggregation-bootstrap-port")
    assert [tuple(record["flags"].get(side) for side in sides) for record in engines] == [
        ("prefill", "5600"), ("prefill", "5601"), ("decode", None), ("decode", None),
    ]  # fmt: skip
    for record in engines:
        check_flags(record["flags"], "sglang-0.5.23")


@pytest.mark.parametrize(
    ("routing", "policy"), [("least_loaded", "power_of_two"), ("round_robin", "round_robin"),
                            ({"policy": "prefix_aware", "load_factor": 2}, "cache_aware")]
)  # fmt: skip
def test_engines_together_have_a_router_with_the_policy(routing: Any, policy: str, tmp_path: Path) -> None:
    system = {"routing": routing, "pools": [pool("engine", roofline("qwen3-14b", 2), 2, 3)]}
    router, *engines = launched(launch_commands(system, tmp_path), tmp_path)
    assert len(engines) == 3
    assert router["words"] == [
        "--host", "0.0.0.0", "--port", "8000", "--policy", policy, "--worker-urls",
        *(f"http://localhost:{port}" for port in (8100, 8101, 8102)),
    ]  # fmt: skip


def flags_of(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("--")]


@pytest.mark.parametrize("apart", [False, True])
def test_manifests_start_the_same_engines(apart: bool, tmp_path: Path) -> None:
    roles = ("prefill", "decode") if apart else ("engine",)
    pools = [pool(role, roofline("llama-3.2-1b", 2, weights="int8"), 2, 2, watermark=0.01) for role in roles]
    deployment = deployment_of({"pools": pools}, tmp_path)
    texts = {write: write(deployment) for write in (compose, llm_d, dynamo)}
    for text in texts.values():
        assert "# Replace MODEL by the weights" in text
    services = yaml.safe_load(texts[compose])["services"]
    router = services.pop("router")["command"][2].partition("exec ")[2].split()
    check_flags(flags_of(router), "vllm-router-0.1.17")
    assert [word for word in router if word.startswith("http")] == [
        f"http://localhost:{8100 + i}" for i in range(len(services))
    ]
    pods = list(yaml.safe_load_all(texts[llm_d]))
    components = yaml.safe_load(texts[dynamo])["spec"]["components"][1:]
    assert [part["replicas"] for part in (*(pod["spec"] for pod in pods), *components)] == [2] * 2 * len(roles)
    servers = [pod["spec"]["template"]["spec"]["containers"][0] for pod in pods]
    workers = [part["podTemplate"]["spec"]["containers"][0] for part in components]
    commands = [service["command"] for service in services.values()]
    for words in (*commands, *(server["args"] for server in servers)):
        assert words[1:3] == ["--tensor-parallel-size", "2"]
        check_flags(flags_of(words))
    limits = [server["resources"]["limits"] for server in (*servers, *workers)]
    assert limits == [{"nvidia.com/gpu": "2"}] * 2 * len(roles)
    for component, worker in zip(components, workers, strict=True):
        check_flags(set(flags_of(worker["args"])) - {"--disaggregation-mode"})
        assert component["type"] == (component["name"] if apart else "worker")
    if apart:
        assert [service["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for service in services.values()] == [
            "5600", "5601", "5602", "5603",
        ]  # fmt: skip
        assert "initContainers" in pods[1]["spec"]["template"]["spec"]
        assert all("--kv-transfer-config" in server["args"] for server in servers)


def test_a_refined_engine_is_the_one_that_was_measured(tmp_path: Path) -> None:
    refined = {"schema": "twin.refined-step-time/1", "step_time": roofline("llama-3.3-70b", 4, cache="fp8"),
               "unknowns": [], "estimate": [], "covariance": [], "drift": 0.01}  # fmt: skip
    (tmp_path / "refined.yaml").write_text(yaml.safe_dump(refined))
    cases = [({"source": "refined", "path": "refined.yaml"}, "meta-llama/Llama-3.3-70B-Instruct", "fp8"),
             ({"source": "linear", "overhead": 0.01}, "MINE", "auto")]  # fmt: skip
    for step_time, model, cache in cases:
        system = {"pools": [pool("engine", step_time, 4)]}
        (started,) = launched(launch_commands(system, tmp_path), tmp_path, MODEL="MINE")
        assert started["words"][1:4] == [model, "--tensor-parallel-size", "4"]
        assert started["flags"]["--kv-cache-dtype"] == cache


def test_settings_that_vllm_has_no_flag_for_are_named(tmp_path: Path) -> None:
    engine = {"chunking": {"policy": "slo", "slo_seconds": 0.05}, "kv_reservation": "max_tokens", "one_shot": None}
    script = launch_commands({"pools": [pool("engine", roofline("qwen3-14b", 1), 1, **engine)]}, tmp_path)
    assert "# vLLM has no flag, or another form, for chunking, kv_reservation: max_tokens.\n" in script


def test_the_files_of_a_plan_may_be_moved_together(folder: Path) -> None:
    """Paths in scenario.yaml start from its folder, wherever the question's file and the current folder are."""
    (folder / "own").mkdir()
    (folder / "own" / "trace.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "200,16\n150,10\n" * 300)
    scenario = document(layouts=["colocated"], engines=[kind("one", 1, 2.0, 1.0)], vary={}, limits={"engines": 2})
    scenario["workload"] = {"trace": {"path": "trace.csv"}, "arrivals": {"process": "poisson", "rate": 20}}
    (folder / "own" / "plan.yaml").write_text(yaml.safe_dump(scenario))
    command = ["plan", "own/plan.yaml", "--write", "own/out", "--no-figures", "--brief", "--jobs", "1"]
    assert run(command) == 0
    text = (folder / "own" / "out" / "scenario.yaml").read_text()
    assert str(folder) not in text
    assert "../trace.csv" in text
    (folder / "own").rename(folder / "elsewhere")
    assert twin.simulate(folder / "elsewhere" / "out" / "scenario.yaml", jobs=1).document["summary"]["ttft"]


def test_paths_of_every_kind_move_and_names_stay(tmp_path: Path) -> None:
    base = tmp_path / "question"
    section = {
        "step_time": {"source": "roofline", "model": "meta-llama/Llama-3.3-70B-Instruct", "hardware": "./mine.yaml",
                      "efficiency": "fits.yaml"},
        "engine": {"lora_config": {"cost": "cost.yaml"}, "speculative_config": {"acceptance_profile": "a.csv"}},
        "system": {"link": {"bandwidth": 1.0}},
        "plugins": ["mine.py", "package.module"],
    }  # fmt: skip
    result = moved(section, base, tmp_path / "out")
    assert result["step_time"] == section["step_time"] | {
        "hardware": "../question/mine.yaml", "efficiency": "../question/fits.yaml",
    }  # fmt: skip
    assert result["engine"]["lora_config"]["cost"] == "../question/cost.yaml"
    assert result["engine"]["speculative_config"]["acceptance_profile"] == "../question/a.csv"
    assert (result["system"], result["plugins"]) == (section["system"], ["../question/mine.py", "package.module"])
    assert re.search(r'"hardware": "/.*/question/mine.yaml"', json.dumps(moved(section, base)))
