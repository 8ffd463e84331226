"""The recommended deployment as files: scenarios to simulate it, and the commands that launch its engines in vLLM."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import Formats
from latency_models.io.builtin_files import is_path
from latency_models.io.config_io import write_yaml
from reports.records.run_directory import naming, write_text
from scenarios.engine import EngineSpec
from schedulers.vllm_versions import NULL_BLOCKS
from twin.planning.given import moved
from twin.planning.nodes import node_size as known_node_size
from twin.planning.nodes import nodes_of, place

if TYPE_CHECKING:
    from latency_models.deployment.models import Model
    from twin.planning.planner import Planner
    from twin.planning.question import Question
    from twin.planning.trial import Trial

Document = dict[str, Any]

WRITTEN_FOR = """\
#!/bin/sh
# For vLLM 0.32. vLLM 0.19 to 0.31 have all of its flags, but may know --quantization fp8 in place of fp8_per_tensor.
# Earlier ones lack --scheduler-reserve-full-isl, and before 0.14 async scheduling is off unless it is asked for.
cd "$(dirname "$0")" || exit 1
"""

CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}'
"""vLLM's transfer of caches between prefill and decode instances. The proxy says which of them an instance is."""

PROXY = """\
# In front is a proxy that sends a prompt to a prefill engine, then to a decode engine, each in turn. This one is of
# vLLM's source code: tests/v1/kv_connector/nixl_integration/toy_proxy_server.py.
"""

FIRST_PORT, FIRST_SIDE_PORT = 8100, 5600
"""Ports of engines, and of NIXL's handshakes, which take one for each data-parallel rank."""

USUAL_MACHINE = 8
"""GPUs of a machine of which no data sheet says it."""

USUAL_POOL: Document = {"role": "both", "replicas": 1, "device": {"type": "device", "count": 1}}
"""Fields of a pool that a file may leave out."""

MODEL_VARIABLE = '"${MODEL:?expected a Hugging Face id or folder}"'

TRANSLATED = frozenset(
    {
        "num_gpu_blocks", "kv_memory", "block_size", "max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching",
        "scheduling_policy", "kv_reservation", "data_parallel_size", "pipeline_parallel_size", "async_scheduling",
        "lora_config", "scheduler_reserve_full_isl", "enable_chunked_prefill", "long_prefill_token_threshold",
        "watermark", "max_num_active_seqs", "prefill_schedule_interval", "scheduler",
    }
)  # fmt: skip
"""Fields of `engine` that the command of an engine has flags for."""


def write_deployment(planner: Planner, folder: Path) -> None:
    """Write `scenario.yaml`, `launch.sh` with vLLM's command for each engine, and `serve_live.sh` into a folder.

    The folder is made. Paths in these files start from it.
    """
    best = planner.best
    assert best is not None
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    scenario = _simulated(planner, best, folder)
    write_text(folder / "scenario.yaml", _header(planner.question, best) + write_yaml(scenario))
    commands = launch_commands(scenario["system"], folder, planner.question.spec.node_size)
    write_text(folder / "launch.sh", commands)
    write_text(folder / "serve_live.sh", serve_live_commands(scenario["system"]))


def _simulated(planner: Planner, trial: Trial, folder: Path) -> Document:
    """The scenario of a deployment, for a file in a folder."""
    question = planner.question if trial.seed is None else planner.question.at_seed(trial.seed)
    document = planner.evaluator(question).scenario(trial.candidate, planner.horizon.long)
    scenario: Document = moved(document, planner.question.path.parent, folder)
    return scenario


def _header(question: Question, trial: Trial) -> str:
    nodes = " and ".join(map(str, nodes_of(question, trial.candidate)))
    return (
        "# The recommended deployment, in windows as it was planned with. The figures of the plan come from:\n"
        f"# twin simulate scenario.yaml --replications {len(trial.windows)}\n"
        f"# GPUs: {trial.candidate.devices}{f' on {nodes}' if nodes else ''}.\n"
    )


def launch_commands(system: Document, base: Path, node_size: int | None = None) -> str:
    """A shell script that starts every engine of a machine, and on the first one the proxy that a deployment needs.

    Args:
        base: the script's folder, where relative paths in `system` start. node_size: GPUs of a machine, if stated.
    """
    pools = [USUAL_POOL | pool for pool in system["pools"]]
    apart = any(pool["role"] != "both" for pool in pools)
    engines, machines = _placed(pools, base, node_size)
    parts = [WRITTEN_FOR]
    if machines > 1:
        parts.append(f': "${{MACHINE:?expected the number of this machine, from 1 to {machines}}}"\n')
    if machines > 1 and apart:
        parts += [f': "${{HOST_{i + 1}:?expected the address of machine {i + 1}}}"\n' for i in range(machines)]
    parts += [
        "\n" + _pool_commands(pool, base, apart=apart, node_size=_machine(pool, base, node_size)) for pool in pools
    ]
    lines = [_start(engine, several=machines > 1, apart=apart) for engine in engines]
    behind = "" if apart or len(engines) < 2 else f"# A router in front spreads requests: {_routing(system)}.\n"
    parts.append("\n# Pool, GPUs, port" + (", address, port of handshakes.\n" if apart else ".\n") + behind)
    parts.append("".join(f"{line} &\n" for line in lines))
    if apart and {engine.role for engine in engines} == {"prefill", "decode"}:
        parts.append("\n" + PROXY + _proxy(engines, several=machines > 1) + " &\n")
    return "".join(parts) + "wait\n"


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine's place: its machine, from 1 up, and GPUs there."""

    pool: str
    role: str
    machine: int
    gpus: list[int]
    port: int
    side_port: int

    def host(self, *, several: bool) -> str:
        return f'"$HOST_{self.machine}"' if several else "localhost"


def _placed(pools: list[Document], base: Path, node_size: int | None) -> tuple[list[_Engine], int]:
    """The engines at their places, and the number of machines; bundles are left out."""
    members = [
        (pool, pool["device"]["count"], _machine(pool, base, node_size))
        for pool in pools
        if pool["step_time"].get("source") != "afd_bundle"
        for _ in range(pool["replicas"])
    ]
    places = place((pool["device"]["type"], count, size) for pool, count, size in members)
    engines: list[_Engine] = []
    side_port = FIRST_SIDE_PORT
    for i, ((pool, count, _), spot) in enumerate(zip(members, places, strict=True)):
        gpus = list(range(spot.first, spot.first + count))
        engines.append(_Engine(pool["name"], pool["role"], spot.node, gpus, FIRST_PORT + i, side_port))
        side_port += pool["engine"].get("data_parallel_size", 1)
    return engines, max((spot.node + spot.span - 1 for spot in places), default=1)


def _machine(pool: Document, base: Path, stated: int | None) -> int:
    """GPUs of a machine."""
    return known_node_size(pool["step_time"], base, stated) or USUAL_MACHINE


def _start(engine: _Engine, *, several: bool, apart: bool) -> str:
    """The line that starts an engine."""
    prefix = f'[ "$MACHINE" = {engine.machine} ] && ' if several else ""
    gpus = ",".join(map(str, engine.gpus))
    address = f" {engine.host(several=several)} {engine.side_port}" if apart else ""
    return f"{prefix}{_function(engine.pool)} {gpus} {engine.port}{address}"


def _function(pool: str) -> str:
    return "start_" + "".join(character if character.isalnum() else "_" for character in pool)


def _proxy(engines: list[_Engine], *, several: bool) -> str:
    words = ['[ "$MACHINE" = 1 ] && ' if several else "", 'python "${PROXY:-toy_proxy_server.py}" --port 8000']
    for role, flag in (("prefill", "prefiller"), ("decode", "decoder")):
        members = [engine for engine in engines if engine.role == role]
        hosts = " ".join(engine.host(several=several) for engine in members)
        words.append(f" --{flag}-hosts {hosts} --{flag}-ports {' '.join(str(engine.port) for engine in members)}")
    return "".join(words)


def _routing(system: Document) -> str:
    routing = system.get("routing", "least_loaded")
    return str(routing.get("policy", routing) if isinstance(routing, dict) else routing)


def _pool_commands(pool: Document, base: Path, *, apart: bool, node_size: int) -> str:
    """A function that starts an engine of a pool."""
    role = "" if pool["role"] == "both" else f" ({pool['role']})"
    title = f"# Pool {pool['name']}{role}: {pool['replicas']} engine{'s' if pool['replicas'] > 1 else ''}.\n"
    step_time = pool["step_time"]
    if step_time.get("source") == "afd_bundle":
        attention, ffn = (step_time.get(f"{side}_instances", 1) for side in ("attention", "ffn"))
        return f"{title}# vLLM has no command for a bundle of {attention} attention and {ffn} FFN instances.\n"
    name = (pool["engine"].get("kv_memory") or {}).get("model") or step_time.get("model")
    shapes = None if name is None else any_model(name, base)
    formats = None if shapes is None else _formats(shapes, pool)
    model, note = _model_words(name, shapes, formats, base)
    notes = [note] if note else []
    if pool["device"]["count"] > node_size:
        notes.append("An engine spans machines: add --nnodes, --node-rank and --master-addr on each of them.")
    if untranslated := _untranslated(pool["engine"]):
        notes.append(f"vLLM has no flag, or another form, for {', '.join(untranslated)}.")
    flags = shlex.join(_flags(pool, formats) + (["--kv-transfer-config", CONNECTOR] if apart else []))
    sides = 'VLLM_NIXL_SIDE_CHANNEL_HOST="$3" VLLM_NIXL_SIDE_CHANNEL_PORT="$4" ' if apart else ""
    body = f'    CUDA_VISIBLE_DEVICES="$1" {sides}vllm serve {model} {flags} --port "$2"\n'
    return title + "".join(f"# {note}\n" for note in notes) + f"{_function(pool['name'])}() {{\n{body}}}\n"


def _model_words(name: str | None, model: Model | None, formats: Formats | None, base: Path) -> tuple[str, str]:
    """The model of a pool's command with its quantisation, and a note on it.

    Weights that are published in the planned format are named. Those in bf16 are quantised to FP8 as they load. Of
    others, and of models of no known name, the script asks for a folder.
    """
    if name is None or model is None:
        return MODEL_VARIABLE, "MODEL: the weights of the model that was planned with."
    checkpoint, folder = None if formats is None else model.checkpoint(formats), _weights_folder(name, base)
    if checkpoint is not None:
        return str(checkpoint.repository), ""
    if folder is not None and formats == model.published_formats:
        return shlex.quote(folder), ""
    original = model.checkpoint(Formats("bf16", "bf16"))
    if str(formats) == "fp8" and original is not None:
        return f"{original.repository} --quantization fp8_per_tensor", ""
    return MODEL_VARIABLE, f"MODEL: the weights of {model.name} in {formats}."


def _weights_folder(name: str, base: Path) -> str | None:
    """The folder of weights beside a config.json, as `name` leads to it; None if there is none."""
    folder = Path(name) if (base / name).is_dir() else Path(name).parent
    return str(folder) if is_path(name) and any((base / folder).glob("*.safetensors")) else None


def _formats(model: Model, pool: Document) -> Formats | None:
    """The formats of weights that a pool was planned with; None if those of the model are not known here."""
    memory, step_time = pool["engine"].get("kv_memory") or {}, pool["step_time"]
    if step_time.get("source") == "roofline":
        return model.formats(step_time.get("weights"), step_time.get("experts"))
    stated = memory.get("weight_bytes")
    return model.published_formats if stated is None else model.formats("fp8" if stated == 1 else "bf16")


def _flags(pool: Document, formats: Formats | None) -> list[str]:
    """The flags of an engine: those that the plan chose, and those whose defaults differ from the scenario's.

    Weights in few bits may come with scales of an FP8 cache, which vLLM uses unless the format is stated.
    """
    engine, step_time = pool["engine"], pool["step_time"]
    memory = engine.get("kv_memory") or {}
    ranks, stages = engine.get("data_parallel_size", 1), engine.get("pipeline_parallel_size", 1)
    degree = memory.get("tensor_parallel_size") or step_time.get("tensor_parallel")
    words = ["--tensor-parallel-size", str(degree or max(pool["device"]["count"] // (ranks * stages), 1))]
    words += ["--pipeline-parallel-size", str(stages)] if stages > 1 else []
    words += ["--data-parallel-size", str(ranks)] if ranks > 1 else []
    words += ["--enable-expert-parallel"] if step_time.get("expert_parallel") not in (None, False, 1) else []
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
        words += [f"--{name.replace('_', '-')}", str(engine.get(name, EngineSpec.model_fields[name].default))]
    if engine.get("num_gpu_blocks") is not None:
        words += ["--num-gpu-blocks-override", str(engine["num_gpu_blocks"] + NULL_BLOCKS)]
    else:
        words += ["--gpu-memory-utilization", str(memory.get("gpu_memory_utilization", 0.9))]
    eight_bits = memory.get("cache_bytes") == 1 or step_time.get("cache") == "fp8"
    usual = "auto" if str(formats) == "bf16" else "bfloat16"
    words += ["--kv-cache-dtype", "fp8" if eight_bits else usual]
    words += ["--scheduling-policy", "priority"] if engine.get("scheduling_policy") == "priority" else []
    words.append(_switch("enable-prefix-caching", engine.get("enable_prefix_caching", True)))
    words.append(_switch("async-scheduling", engine.get("async_scheduling", False)))
    words.append(_switch("scheduler-reserve-full-isl", engine.get("scheduler_reserve_full_isl", True)))
    words += [] if engine.get("enable_chunked_prefill", True) else ["--no-enable-chunked-prefill"]
    for name in ("long_prefill_token_threshold", "watermark", "max_num_active_seqs", "prefill_schedule_interval"):
        if engine.get(name, default := EngineSpec.model_fields[name].default) != default:
            words += [f"--{name.replace('_', '-')}", str(engine[name])]
    return words + _lora(engine.get("lora_config"))


def _switch(name: str, on: bool) -> str:
    return f"--{name}" if on else f"--no-{name}"


def _lora(section: Document | None) -> list[str]:
    if section is None:
        return []
    words = ["--enable-lora", "--max-loras", str(section.get("max_loras", 1))]
    words += ["--max-lora-rank", str(section.get("max_lora_rank", 16))]
    return words + (["--max-cpu-loras", str(section["max_cpu_loras"])] if section.get("max_cpu_loras") else [])


def _untranslated(engine: Document) -> list[str]:
    """Fields of `engine` that differ from their defaults and have no flag."""
    fields = EngineSpec.model_fields
    changed = [name for name, value in engine.items() if name in fields and value not in (None, fields[name].default)]
    partly = []
    if engine.get("kv_reservation") == "max_tokens":
        partly.append("kv_reservation: max_tokens")
    if engine.get("scheduling_policy", "fcfs") not in ("fcfs", "priority"):
        partly.append("scheduling_policy")
    return [name for name in changed if name not in TRANSLATED] + partly


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
