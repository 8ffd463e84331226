"""The recommended deployment as files: scenarios to simulate it, and the commands that launch its engines in vLLM."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latency_models.io.config_io import write_yaml
from reports.records.run_directory import naming, write_text
from twin.planning.paths import absolute

if TYPE_CHECKING:
    from twin.planning.judging import Verdict
    from twin.planning.planner import Planner

Document = dict[str, Any]

CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
"""vLLM's transfer of caches between prefill and decode instances."""


def write_deployment(planner: Planner, folder: Path) -> None:
    """Write `scenario.yaml`, `launch.sh` with vLLM's command for each pool, and `serve_live.sh` into a folder.

    The folder is made.

    Raises:
        OSError: it cannot be written.
    """
    best = planner.best
    assert best is not None
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    scenario = simulated(planner, best)
    write_text(folder / "scenario.yaml", _header(best) + write_yaml(scenario))
    write_text(folder / "launch.sh", launch_commands(scenario["system"]))
    write_text(folder / "serve_live.sh", serve_live_commands(scenario["system"]))


def simulated(planner: Planner, verdict: Verdict) -> Document:
    """The scenario of a deployment, with absolute paths."""
    question = planner.question if verdict.seed is None else planner.question.at_seed(verdict.seed)
    made = planner.judge(question).scenario(verdict.candidate, planner.horizon.long)
    made_absolute: Document = absolute(made, planner.question.path.parent.absolute())
    return made_absolute


def _header(verdict: Verdict) -> str:
    return (
        "# The recommended deployment, in windows as it was planned with. The figures of the plan come from:\n"
        f"# twin simulate scenario.yaml --replications {len(verdict.windows)}\n"
    )


def launch_commands(system: Document) -> str:
    """A shell script with the command of one engine of each pool, and how many of them there are."""
    apart = any(pool["role"] != "both" for pool in system["pools"])
    lines = [
        "#!/bin/sh",
        "# One line for each pool; start it once for each engine, with its own port and devices.",
    ]
    if apart:
        lines.append(
            "# In front of both pools is a proxy that sends a prompt to a prefill engine, then to a decode engine"
        )
        lines.append("# (vLLM: examples/online_serving/disaggregated_serving).")
    for pool in system["pools"]:
        role = "" if pool["role"] == "both" else f" ({pool['role']})"
        lines += ["", f"# pool {pool['name']}{role}: {pool['replicas']} engines", _vllm(pool, apart=apart)]
    return "\n".join(lines) + "\n"


def serve_live_commands(system: Document) -> str:
    """A shell script that serves the deployment with `twin serve-live`, from the scenario beside it."""
    pools = system["pools"]
    lines = [
        "#!/bin/sh",
        "# The same deployment on the live backend, with the settings of scenario.yaml. MODEL is the model's folder.",
        'cd "$(dirname "$0")" || exit 1',
        ': "${MODEL:?expected the folder of a Hugging Face model}"',
    ]
    if any(pool.get("device", {}).get("count", 1) > 1 for pool in pools):
        lines.append("# A live engine runs on one device: the parallelism of the plan is left out.")
    if len(pools) > 1:
        engines = ", ".join(f"{pool['replicas']} of pool {pool['name']}" for pool in pools)
        lines += ["", f"# One server in front, and a process for each engine: {engines}.", _serve_live(8000)]
    else:
        (pool,) = pools
        lines += ["", f"# Pool {pool['name']}: one server for each of {pool['replicas']} engines, behind a router."]
        lines += [_serve_live(8000 + i) + " &" for i in range(pool["replicas"])] + ["wait"]
    return "\n".join(lines) + "\n"


def _serve_live(port: int) -> str:
    """The command of one server; `$@` has further options, such as --device cuda."""
    return f'twin serve-live --model "$MODEL" --scenario scenario.yaml --port {port} "$@"'


def _vllm(pool: Document, *, apart: bool) -> str:
    """The command of one engine."""
    engine, memory = pool["engine"], pool["engine"].get("kv_memory") or {}
    step_time = pool["step_time"]
    if step_time.get("source") == "afd_bundle":
        attention, ffn = (step_time.get(f"{side}_instances", 1) for side in ("attention", "ffn"))
        return f"# vLLM has no command for a bundle of {attention} attention and {ffn} FFN instances."
    degree = memory.get("tensor_parallel_size") or step_time.get("tensor_parallel") or pool["device"]["count"]
    ranks, stages = engine.get("data_parallel_size", 1), engine.get("pipeline_parallel_size", 1)
    words = ["vllm", "serve", str(memory.get("model") or step_time.get("model") or "MODEL")]
    words += ["--tensor-parallel-size", str(degree)]
    words += ["--pipeline-parallel-size", str(stages)] if stages > 1 else []
    words += ["--data-parallel-size", str(ranks)] if ranks > 1 else []
    words += ["--enable-expert-parallel"] if step_time.get("expert_parallel") not in (None, False, 1) else []
    words += ["--max-num-seqs", str(engine.get("max_num_seqs", 128))]
    words += ["--max-num-batched-tokens", str(engine.get("max_num_batched_tokens", 2048))]
    words += ["--block-size", str(engine.get("block_size", 16))]
    if "gpu_memory_utilization" in memory:
        words += ["--gpu-memory-utilization", str(memory["gpu_memory_utilization"])]
    if engine.get("num_gpu_blocks") is not None:
        words += ["--num-gpu-blocks-override", str(engine["num_gpu_blocks"])]
    words += ["--enable-prefix-caching" if engine.get("enable_prefix_caching", True) else "--no-enable-prefix-caching"]
    words += ["--scheduling-policy", "priority"] if engine.get("scheduling_policy") == "priority" else []
    words += ["--async-scheduling"] if engine.get("async_scheduling") else []
    words += ["--quantization", "fp8"] if memory.get("weight_bytes") == 1 else []
    words += ["--kv-cache-dtype", "fp8"] if memory.get("cache_bytes") == 1 else []
    words += ["--kv-transfer-config", CONNECTOR] if apart else []
    return shlex.join(words)
