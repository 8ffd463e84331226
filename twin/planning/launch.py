"""Commands that start a plan's engines in vLLM 0.32 or SGLang 0.5.23, each at its place, and scripts of them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import Formats
from latency_models.io.files import is_path
from latency_models.sources.refined import read_refined_file
from scenarios.engine import EngineSpec
from schedulers.engine_config import NULL_BLOCKS
from twin.planning.cost import node_size as known_node_size
from twin.planning.cost import place

if TYPE_CHECKING:
    from latency_models.deployment.models import Model

Document = dict[str, Any]

CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}'
"""vLLM's transfer of caches between prefill and decode instances. The proxy says which of them an instance is."""

COMMON = frozenset(
    {
        "num_gpu_blocks", "kv_memory", "block_size", "max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching",
        "scheduling_policy", "kv_reservation", "data_parallel_size", "pipeline_parallel_size", "async_scheduling",
        "lora_config", "enable_chunked_prefill", "scheduler",
    }
)  # fmt: skip
"""Fields of `engine` that both engines have flags for."""

VLLM_OWN = ("long_prefill_token_threshold", "watermark", "max_num_active_seqs", "prefill_schedule_interval")
"""Fields of the names of vLLM's flags, which are stated where they are not the defaults."""

WRITTEN_FOR = """\
#!/bin/sh
# For vLLM 0.32. vLLM 0.19 to 0.31 have all of its flags, but may know --quantization fp8 in place of fp8_per_tensor.
# Earlier ones lack --scheduler-reserve-full-isl, and before 0.14 async scheduling is off unless it is asked for.
# Needs: pip install vllm vllm-router
cd "$(dirname "$0")" || exit 1
"""

WRITTEN_FOR_SGLANG = """\
#!/bin/sh
# For SGLang 0.5.23. Needs: pip install sglang sglang-router
cd "$(dirname "$0")" || exit 1
"""

FIRST_PORT, FIRST_SIDE_PORT, ROUTER_PORT = 8100, 5600, 8000
"""Ports of engines, of handshakes of transfers (NIXL's take one for each data-parallel rank), and of the router."""

USUAL_MACHINE = 8
"""GPUs of a machine of which no data sheet says it."""

USUAL_POOL: Document = {"role": "both", "replicas": 1, "device": {"type": "device", "count": 1}}
"""Fields of a pool that a file may leave out."""

MODEL_VARIABLE = '"${MODEL:?expected a Hugging Face id or folder}"'

POLICIES = {"round_robin": "round_robin", "prefix_aware": "cache_aware", "session_affinity": "cache_aware",
            "consistent_hashing": "cache_aware", "weighted_random": "random"}  # fmt: skip
"""Policies of the routers of vLLM and SGLang by ours; others weigh loads, as power_of_two does there."""

Flags = dict[str, object]
"""Values by flag: "" of one that has none, None of one that is left out."""


def _vllm_flags(pool: Document, engine: Document, formats: Formats | None, *, apart: bool) -> Flags:
    """The flags of an engine: those that the plan chose, and those whose defaults differ from the scenario's.

    Weights in few bits may come with scales of an FP8 cache, which vLLM uses unless the format is stated.
    """
    fields = EngineSpec.model_fields
    switches = ("enable_prefix_caching", "async_scheduling", "scheduler_reserve_full_isl")
    return {
        "--tensor-parallel-size": _degree(pool),
        "--pipeline-parallel-size": _several(engine["pipeline_parallel_size"]),
        "--data-parallel-size": _several(engine["data_parallel_size"]),
        "--enable-expert-parallel": _bare(_spreads_experts(pool)),
        **{_flag(name): engine[name] for name in ("max_num_seqs", "max_num_batched_tokens", "block_size")},
        **_memory(engine, ("--num-gpu-blocks-override", lambda blocks: blocks + NULL_BLOCKS), "gpu-memory-utilization"),
        "--kv-cache-dtype": _cache(pool, formats, "fp8", "bfloat16"),
        "--scheduling-policy": "priority" if engine["scheduling_policy"] == "priority" else None,
        **{_flag(name if engine[name] else f"no_{name}"): "" for name in switches},
        "--no-enable-chunked-prefill": _bare(not engine["enable_chunked_prefill"]),
        **{_flag(name): engine[name] for name in VLLM_OWN if engine[name] != fields[name].default},
        **_lora(engine["lora_config"], "--max-loras", "--max-cpu-loras"),
        "--kv-transfer-config": CONNECTOR if apart else None,
    }


def _sglang_flags(pool: Document, engine: Document, formats: Formats | None, *, apart: bool) -> Flags:
    """The flags of an engine in SGLang. Data-parallel attention divides the ranks of its tensor parallelism."""
    size, width = engine["block_size"], _degree(pool) * engine["data_parallel_size"]
    return {
        "--tp-size": width,
        "--pp-size": _several(engine["pipeline_parallel_size"]),
        "--attn-dp-size": _several(engine["data_parallel_size"]),
        "--ep-size": width if _spreads_experts(pool) else None,
        "--max-running-requests": engine["max_num_seqs"],
        "--chunked-prefill-size": engine["max_num_batched_tokens"] if engine["enable_chunked_prefill"] else -1,
        "--page-size": size,
        **_memory(engine, ("--max-total-tokens", lambda blocks: blocks * size), "mem-fraction-static"),
        "--kv-cache-dtype": _cache(pool, formats, "fp8_e4m3", "bf16"),
        "--schedule-policy": "fcfs",
        "--enable-priority-scheduling": _bare(engine["scheduling_policy"] == "priority"),
        "--disable-radix-cache": _bare(not engine["enable_prefix_caching"]),
        "--disable-overlap-schedule": _bare(not engine["async_scheduling"]),
        **_lora(engine["lora_config"], "--max-loras-per-batch", "--max-loaded-loras"),
        "--disaggregation-mode": pool["role"] if apart else None,
        "--disaggregation-transfer-backend": "nixl" if apart else None,
        "--enable-mixed-chunk": _bare(not apart),  # prompts and decodes in one batch, as they were planned
    }


@dataclass(frozen=True)
class Program:
    """An engine program: how its engines are started, and a router in front.

    Attributes:
        flags: of an engine. quantization: of weights in bf16 that become FP8 as they load. own: fields of `engine` with
            a flag, beside `COMMON`. serve: what stands before the model. prefill: after the flags of engines that
            prefill. apart: the router's flag that says that prefill and decode are apart.
        bootstrap: the router knows ports of handshakes.
    """

    name: str
    header: str
    flags: Callable[..., Flags]
    quantization: str
    own: frozenset[str]
    serve: str
    environment: str
    prefill: str
    router: str
    apart: str
    bootstrap: bool


VLLM = Program(
    "vLLM", WRITTEN_FOR, _vllm_flags, "fp8_per_tensor", frozenset({"scheduler_reserve_full_isl", *VLLM_OWN}),
    "vllm serve", 'VLLM_NIXL_SIDE_CHANNEL_HOST="$3" VLLM_NIXL_SIDE_CHANNEL_PORT="$4" ', "", "vllm-router",
    "--vllm-pd-disaggregation", bootstrap=False,
)  # fmt: skip

SGLANG = Program(
    "SGLang", WRITTEN_FOR_SGLANG, _sglang_flags, "fp8", frozenset(),
    "python -m sglang.launch_server --host 0.0.0.0 --model-path", "", ' --disaggregation-bootstrap-port "$4"',
    "python -m sglang_router.launch_router", "--pd-disaggregation", bootstrap=True,
)  # fmt: skip


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _several(number: int) -> int | None:
    return number if number > 1 else None


def _bare(on: bool) -> str | None:
    return "" if on else None


def _memory(engine: Document, blocks: tuple[str, Callable[[int], int]], share: str) -> Flags:
    """The flag of the KV cache's blocks, or of the share of the memory."""
    if engine["num_gpu_blocks"] is not None:
        flag, number = blocks
        return {flag: number(engine["num_gpu_blocks"])}
    return {f"--{share}": (engine["kv_memory"] or {}).get("gpu_memory_utilization", 0.9)}


def _degree(pool: Document) -> int:
    """Tensor parallelism of an engine, or of each of its data-parallel ranks."""
    engine = pool["engine"]
    stated = (engine.get("kv_memory") or {}).get("tensor_parallel_size") or pool["step_time"].get("tensor_parallel")
    ranks = engine.get("data_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    return int(stated or max(pool["device"]["count"] // ranks, 1))


def _cache(pool: Document, formats: Formats | None, eight_bits: str, sixteen_bits: str) -> str:
    """The cache's format: that of bf16 weights, or of a model that is not known at all, follows from the weights."""
    if (pool["engine"].get("kv_memory") or {}).get("cache_bytes") == 1 or pool["step_time"].get("cache") == "fp8":
        return eight_bits
    return "auto" if str(formats) == "bf16" or not _model_name(pool) else sixteen_bits


def _spreads_experts(pool: Document) -> bool:
    """True if experts are whole on some device: a source says so, or their number of devices."""
    value = pool["step_time"].get("expert_parallel")
    return value is True or (value or 0) > 1


def _lora(section: Document | None, in_step: str, in_memory: str) -> Flags:
    if section is None:
        return {}
    adapters = {"--enable-lora": "", in_step: section.get("max_loras", 1)}
    return {
        **adapters,
        "--max-lora-rank": section.get("max_lora_rank", 16),
        in_memory: section.get("max_cpu_loras") or None,
    }


@dataclass(frozen=True, slots=True)
class PoolCommand:
    """The command of each engine of a pool, without its place.

    `model`: a repository or folder; None where the user has to say it. `flags`: words after it. `notes`: on what the
    command lacks.
    """

    pool: Document
    model: str | None
    flags: list[str]
    notes: list[str]


def pool_command(pool: Document, base: Path, program: Program = VLLM, *, apart: bool) -> PoolCommand:
    """The command of a pool. `apart`: prefill and decode are engines of their own."""
    step_time = pool["step_time"]
    if step_time.get("source") == "refined":  # whose base states model and parallelism
        pool = {**pool, "step_time": read_refined_file(base / step_time["path"]).step_time}
    formats, model, quantised, notes = _weights(pool, base)
    fields = EngineSpec.model_fields
    engine = {name: pool["engine"].get(name, field.default) for name, field in fields.items()}
    flags: Flags = {"--quantization": program.quantization if quantised else None}
    flags |= program.flags(pool, engine, formats, apart=apart)
    words = [word for flag, value in flags.items() if value is not None for word in (flag, str(value)) if word]
    return PoolCommand(pool, model, words, notes + _without_flags(program, pool["engine"]))


def _weights(pool: Document, base: Path) -> tuple[Formats | None, str | None, bool, list[str]]:
    """Formats of a pool's weights, the model of its command, whether it is quantised as it loads, and a note on it.

    Weights that are published in the planned format are named. Those in bf16 are quantised to FP8 as they load. Of
    others, and of models of no known name, the script asks for a folder.
    """
    name = _model_name(pool)
    model = None if name is None else any_model(name, base)
    if name is None or model is None:
        return None, None, False, ["MODEL: the weights of the model that was planned with."]
    formats = _formats(model, pool)
    checkpoint, folder = None if formats is None else model.checkpoint(formats), _weights_folder(name, base)
    if checkpoint is not None:
        return formats, str(checkpoint.repository), False, []
    if folder is not None and formats == model.published_formats:
        return formats, folder, False, []
    original = model.checkpoint(Formats("bf16", "bf16"))
    if str(formats) == "fp8" and original is not None:
        return formats, str(original.repository), True, []
    return formats, None, False, [f"MODEL: the weights of {model.name} in {formats}."]


def _model_name(pool: Document) -> str | None:
    name: str | None = (pool["engine"].get("kv_memory") or {}).get("model") or pool["step_time"].get("model")
    return name


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


def _without_flags(program: Program, engine: Document) -> list[str]:
    """A note on fields of `engine` that differ from their defaults and have no flag."""
    fields, known = EngineSpec.model_fields, COMMON | program.own
    changed = [name for name, value in engine.items() if name in fields and value not in (None, fields[name].default)]
    names = [name for name in changed if name not in known]
    names += ["kv_reservation: max_tokens"] if engine.get("kv_reservation") == "max_tokens" else []
    names += [] if engine.get("scheduling_policy", "fcfs") in ("fcfs", "priority") else ["scheduling_policy"]
    return [f"{program.name} has no flag, or another form, for {', '.join(names)}."] if names else []


@dataclass(frozen=True, slots=True)
class Place:
    """An engine's place: its machine, from 1 up, GPUs there, and ports of requests and of handshakes."""

    pool: str
    role: str
    machine: int
    gpus: list[int]
    port: int
    side_port: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """The engines of a plan in one program.

    `pools`: as the scenario has them. `commands`: of pools of engines, by name; AFD bundles have none. `places`: of all
    engines. `apart`: prefill and decode are engines of their own. `policy`: of the router.
    """

    pools: list[Document]
    commands: dict[str, PoolCommand]
    places: list[Place]
    machines: int
    policy: str
    apart: bool

    @property
    def has_router(self) -> bool:
        """True if there is something to choose, and a decode engine for prefill engines."""
        roles = {place.role for place in self.places}
        return len(self.places) > 1 and (not self.apart or roles >= {"prefill", "decode"})

    def host(self, place: Place, form: str) -> str:
        """The address of an engine's machine. `form`: of a variable, with the machine's number in place of {}."""
        return form.format(place.machine) if self.machines > 1 else "localhost"

    def router(self, program: Program, form: str) -> str:
        """The command of the router."""
        words = [f"{program.router} --host 0.0.0.0 --port {ROUTER_PORT} --policy {self.policy}"]
        words.append(program.apart if self.apart else "--worker-urls")
        for engine in self.places:
            url = f"http://{self.host(engine, form)}:{engine.port}"
            side = f" {engine.side_port}" if program.bootstrap and engine.role == "prefill" else ""
            words.append(f"--{engine.role} {url}{side}" if self.apart else url)
        return " ".join(words)


def deployment_of(system: Document, base: Path, node_size: int | None = None, program: Program = VLLM) -> Deployment:
    """The engines of a scenario's section `system`, with their commands and places.

    `base`: the folder where relative paths in `system` start. `node_size`: GPUs of a machine, if stated.
    """
    pools = [USUAL_POOL | pool for pool in system["pools"]]
    pools = [pool | {"machine": known_node_size(pool["step_time"], base, node_size) or USUAL_MACHINE} for pool in pools]
    apart = any(pool["role"] != "both" for pool in pools)
    startable = [pool for pool in pools if pool["step_time"].get("source") != "afd_bundle"]
    members = [pool for pool in startable for _ in range(pool["replicas"])]
    spots = place((pool["device"]["type"], pool["device"]["count"], pool["machine"]) for pool in members)
    places: list[Place] = []
    side_port = FIRST_SIDE_PORT
    for i, (pool, spot) in enumerate(zip(members, spots, strict=True)):
        gpus = list(range(spot.first, spot.first + pool["device"]["count"]))
        places.append(Place(pool["name"], pool["role"], spot.node, gpus, FIRST_PORT + i, side_port))
        side_port += pool["engine"].get("data_parallel_size", 1)
    machines = max((spot.node + spot.span - 1 for spot in spots), default=1)
    routing = system.get("routing", "least_loaded")
    policy = POLICIES.get(str(routing.get("policy") if isinstance(routing, dict) else routing), "power_of_two")
    commands = {pool["name"]: pool_command(pool, base, program, apart=apart) for pool in startable}
    return Deployment(pools, commands, places, machines, policy, apart)


def launch_commands(system: Document, base: Path, node_size: int | None = None, program: Program = VLLM) -> str:
    """A shell script that starts every engine of a machine, and on the first one the router in front.

    `base`: the script's folder, where relative paths in `system` start. `node_size`: GPUs of a machine, if stated.
    """
    deployment = deployment_of(system, base, node_size, program)
    machines, apart, form = deployment.machines, deployment.apart, '"$HOST_{}"'
    parts, on_machine = [program.header], ""
    if machines > 1:
        on_machine = '[ "$MACHINE" = {} ] && '
        parts.append(f': "${{MACHINE:?expected the number of this machine, from 1 to {machines}}}"\n')
        parts += [f': "${{HOST_{i + 1}:?expected the address of machine {i + 1}}}"\n' for i in range(machines)]
    parts += [_pool_function(pool, deployment.commands.get(pool["name"]), program, apart) for pool in deployment.pools]
    parts.append("\n# Pool, GPUs, port" + (", address, port of handshakes.\n" if apart else ".\n"))
    for engine in deployment.places:
        gpus = ",".join(map(str, engine.gpus))
        address = f" {deployment.host(engine, form)} {engine.side_port}" if apart else ""
        parts.append(f"{on_machine.format(engine.machine)}{_function(engine.pool)} {gpus} {engine.port}{address} &\n")
    if deployment.has_router:
        parts.append(f"\n# The router, port {ROUTER_PORT}.\n")
        parts.append(f"{on_machine.format(1)}{deployment.router(program, form)} &\n")
    return "".join(parts) + "wait\n"


def _function(pool: str) -> str:
    return "start_" + "".join(character if character.isalnum() else "_" for character in pool)


def _pool_function(pool: Document, command: PoolCommand | None, program: Program, apart: bool) -> str:
    """A function that starts an engine of a pool."""
    role = "" if pool["role"] == "both" else f" ({pool['role']})"
    title = f"\n# Pool {pool['name']}{role}: {pool['replicas']} engine{'s' if pool['replicas'] > 1 else ''}.\n"
    if command is None:
        attention, ffn = (pool["step_time"].get(f"{side}_instances", 1) for side in ("attention", "ffn"))
        return f"{title}# There is no command for a bundle of {attention} attention and {ffn} FFN instances.\n"
    notes = list(command.notes)
    if pool["device"]["count"] > pool["machine"]:
        notes.append("An engine spans machines: add --nnodes, --node-rank and --master-addr on each of them.")
    model = MODEL_VARIABLE if command.model is None else shlex.quote(command.model)
    environment = program.environment if apart else ""
    side = program.prefill if pool["role"] == "prefill" else ""
    body = (
        f'CUDA_VISIBLE_DEVICES="$1" {environment}{program.serve} {model} {shlex.join(command.flags)} --port "$2"{side}'
    )
    return title + "".join(f"# {note}\n" for note in notes) + f"{_function(pool['name'])}() {{\n    {body}\n}}\n"


def live_commands(system: Document) -> str:
    """A shell script that serves the deployment with `twin serve-live`, from the scenario beside it."""
    pools = system["pools"]
    lines = [
        "#!/bin/sh",
        "# The same deployment on the live backend, with the settings of scenario.yaml. MODEL is the model's folder.",
        'cd "$(dirname "$0")" || exit 1',
        ': "${MODEL:?expected the folder of a Hugging Face model}"',
    ]
    if any(pool.get("device", {}).get("count", 1) > 1 for pool in pools):
        lines.append("# Live engines have the plan's tensor parallelism; those of several pools have one device each.")
    serve = 'twin serve-live --model "$MODEL" --scenario scenario.yaml --port {} "$@"'  # "$@": as --device cuda
    if len(pools) > 1:
        engines = ", ".join(f"{pool['replicas']} of pool {pool['name']}" for pool in pools)
        lines += ["", f"# One server in front, and a process for each engine: {engines}.", serve.format(8000)]
    else:
        (pool,) = pools
        lines += ["", f"# Pool {pool['name']}: one server for each of {pool['replicas']} engines, behind a router."]
        lines += [serve.format(8000 + i) + " &" for i in range(pool["replicas"])] + ["wait"]
    return "\n".join(lines) + "\n"
