"""launch.sh launches what was planned. It is run here, with a stand-in for vLLM that records its arguments."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import twin
from tests.twin.planning.scenarios import document, kind
from twin.cli import run
from twin.planning.given import moved
from twin.planning.launch import launch_commands

# Flags of `vllm serve` in vLLM 0.32.0 that concern the model, parallelism, the KV cache, the scheduler, LoRA and the
# address. Those with a star are true or false, and have a form that begins with --no-.
FLAGS = """
--additional-config --all2all-backend --async-scheduling* --attention-backend --attention-config --block-size
--compilation-config --cp-kv-cache-interleave-size --cpu-offload-gb --cudagraph-capture-sizes --data-parallel-address
--data-parallel-backend --data-parallel-external-lb* --data-parallel-hybrid-lb* --data-parallel-rank
--data-parallel-rpc-port --data-parallel-size --data-parallel-size-local --data-parallel-start-rank
--decode-context-parallel-size --default-mm-loras --device-ids --disable-cascade-attn* --disable-chunked-mm-input*
--disable-custom-all-reduce* --disable-hybrid-kv-cache-manager* --disable-log-stats* --disable-sliding-window*
--distributed-executor-backend --dtype --ec-transfer-config --enable-chunked-prefill* --enable-dbo* --enable-eplb*
--enable-expert-parallel* --enable-lora* --enable-prefix-caching* --enable-prompt-embeds* --enable-sleep-mode*
--enforce-eager* --eplb-config --expert-placement-strategy --fully-sharded-loras* --generation-config
--gpu-memory-utilization --hf-config-path --hf-overrides --host --kv-cache-dtype --kv-cache-memory-bytes
--kv-events-config --kv-offloading-backend --kv-offloading-size --kv-sharing-fast-prefill* --kv-transfer-config
--load-format --long-prefill-token-threshold --lora-dtype --master-addr --master-port --max-cpu-loras
--max-cudagraph-capture-size --max-logprobs --max-lora-rank --max-loras --max-model-len --max-num-active-seqs
--max-num-batched-tokens --max-num-queued-reqs --max-num-queued-tokens --max-num-scheduled-tokens --max-num-seqs
--model --model-impl --moe-backend --nnodes --node-rank --num-gpu-blocks-override --optimization-level
--override-generation-config --pipeline-parallel-size --port --prefill-context-parallel-size
--prefill-schedule-interval --prefix-caching-hash-algo --quantization --quantization-config --revision --runner
--scheduler-cls --scheduler-reserve-full-isl* --scheduling-policy --seed --served-model-name --spec-method --spec-model
--spec-tokens --speculative-config --stream-interval --structured-outputs-config --tensor-parallel-size --tokenizer
--tokenizer-mode --trust-remote-code* --watermark
"""
KNOWN = {flag.rstrip("*") for flag in FLAGS.split()}
SWITCHES = {flag.rstrip("*") for flag in FLAGS.split() if flag.endswith("*")}
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
    for name in ("vllm", "python"):
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
    role = name if name in ("prefill", "decode") else "both"
    device = {"type": "h200-sxm", "count": count}
    return {
        "name": name,
        "role": role,
        "replicas": replicas,
        "engine": engine,
        "step_time": step_time,
        "device": device,
    }


def check_flags(engine: dict[str, Any]) -> None:
    for flag in engine["flags"]:
        positive = flag.replace("--no-", "--")
        assert flag in KNOWN or positive in SWITCHES, flag
    assert engine["flags"].get("--quantization", "fp8") in QUANTIZATIONS


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
    check_flags(started)
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


def test_prefill_and_decode_apart_have_a_proxy_in_front(tmp_path: Path) -> None:
    prefill, decode = roofline("qwen3-14b", 2), roofline("qwen3-14b", 4, cache="fp8")
    system = {"pools": [pool("prefill", prefill, 2, 2), pool("decode", decode, 4, 3)]}
    script = launch_commands(system, tmp_path)
    hosts = {"HOST_1": "one", "HOST_2": "two"}
    first, second = (launched(script, tmp_path, MACHINE=str(i), **hosts) for i in (1, 2))
    proxy, *engines = first[0], *first[1:], *second
    assert proxy["program"] == "python"
    assert proxy["flags"] == {
        "--port": "8000",
        "--prefiller-hosts": "one one",
        "--prefiller-ports": "8100 8101",
        "--decoder-hosts": "one two two",
        "--decoder-ports": "8102 8103 8104",
    }
    assert [record["flags"]["--port"] for record in engines] == ["8100", "8101", "8102", "8103", "8104"]
    assert [record["environment"]["CUDA_VISIBLE_DEVICES"] for record in engines] == [
        "0,1",
        "2,3",
        "4,5,6,7",
        "0,1,2,3",
        "4,5,6,7",
    ]
    assert [record["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] for record in engines] == ["one"] * 3 + ["two"] * 2
    assert len({record["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for record in engines}) == 5
    for record in engines:
        check_flags(record)
        assert json.loads(record["flags"]["--kv-transfer-config"])["kv_connector"] == "NixlConnector"
    assert {record["flags"]["--kv-cache-dtype"] for record in engines} == {"auto", "fp8"}


def test_settings_that_vllm_has_no_flag_for_are_named(tmp_path: Path) -> None:
    engine = {"chunking": {"policy": "slo", "slo_seconds": 0.05}, "kv_reservation": "max_tokens", "one_shot": None}
    script = launch_commands({"pools": [pool("engine", roofline("qwen3-14b", 1), 1, **engine)]}, tmp_path)
    assert "# vLLM has no flag, or another form, for chunking, kv_reservation: max_tokens.\n" in script


def test_the_files_of_a_plan_may_be_moved_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in scenario.yaml start from its folder, wherever the question's file and the current folder are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "trace.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "200,16\n150,10\n" * 300)
    scenario = document(layouts=["colocated"], engines=[kind("one", 1, 2.0, 1.0)], vary={}, limits={"engines": 2})
    scenario["workload"] = {"trace": {"path": "trace.csv"}, "arrivals": {"process": "poisson", "rate": 20}}
    (tmp_path / "own" / "plan.yaml").write_text(yaml.safe_dump(scenario))
    command = ["plan", "own/plan.yaml", "--write", "own/out", "--no-figures", "--brief", "--jobs", "1"]
    assert run(command) == 0
    text = (tmp_path / "own" / "out" / "scenario.yaml").read_text()
    assert str(tmp_path) not in text
    assert "../trace.csv" in text
    (tmp_path / "own").rename(tmp_path / "elsewhere")
    assert twin.simulate(tmp_path / "elsewhere" / "out" / "scenario.yaml", jobs=1).document["summary"]["ttft"]


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
    assert (result["system"], result["plugins"]) == (
        section["system"],
        ["../question/mine.py", "package.module"],
    )
    assert re.search(r'"hardware": "/.*/question/mine.yaml"', json.dumps(moved(section, base)))
