"""Commands that start a plan's engines in vLLM 0.32 or SGLang 0.5.23, and manifests: compose, llm-d and Dynamo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import Formats
from latency_models.io.config_io import write_yaml
from latency_models.io.files import is_path
from latency_models.sources.refined import read_refined_file
from scenarios.engine import EngineSpec
from schedulers.engine_config import NULL_BLOCKS

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

VLLM_ONLY = frozenset(
    {"scheduler_reserve_full_isl", "long_prefill_token_threshold", "watermark", "max_num_active_seqs",
     "prefill_schedule_interval"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PoolCommand:
    """The command of each engine of a pool, without its place.

    Attributes:
        model: a repository or folder; None where the user has to say it. flags: words after it. notes: on what the
            command lacks. devices: GPUs of an engine.
    """

    pool: str
    role: str
    replicas: int
    devices: int
    model: str | None
    flags: list[str]
    notes: list[str]


def vllm_command(pool: Document, base: Path, *, apart: bool) -> PoolCommand:
    """The command `vllm serve` of a pool. `apart`: prefill and decode are engines of their own."""
    pool = _measured(pool, base)
    formats, model, quantised, notes = _weights(pool, base)
    flags = (["--quantization", "fp8_per_tensor"] if quantised else []) + _vllm_flags(pool, formats)
    flags += ["--kv-transfer-config", CONNECTOR] if apart else []
    return _pool_command(pool, model, flags, notes + _without_flags("vLLM", pool["engine"], COMMON | VLLM_ONLY))


def sglang_command(pool: Document, base: Path, *, apart: bool) -> PoolCommand:
    """The command `sglang.launch_server` of a pool, likewise."""
    pool = _measured(pool, base)
    formats, model, quantised, notes = _weights(pool, base)
    flags = (["--quantization", "fp8"] if quantised else []) + _sglang_flags(pool, formats)
    if apart:
        flags += ["--disaggregation-mode", pool["role"], "--disaggregation-transfer-backend", "nixl"]
    else:
        flags += ["--enable-mixed-chunk"]  # prompts and decodes in one batch, as they were planned
    return _pool_command(pool, model, flags, notes + _without_flags("SGLang", pool["engine"], COMMON))


def _pool_command(pool: Document, model: str | None, flags: list[str], notes: list[str]) -> PoolCommand:
    return PoolCommand(
        pool["name"],
        pool["role"],
        pool["replicas"],
        pool["device"]["count"],
        model,
        flags,
        [note for note in notes if note],
    )


def _measured(pool: Document, base: Path) -> Document:
    """A pool whose step times are those that a run has refined, which state model and parallelism."""
    section = pool["step_time"]
    if section.get("source") != "refined":
        return pool
    return {**pool, "step_time": read_refined_file(base / section["path"]).step_time}


def _weights(pool: Document, base: Path) -> tuple[Formats | None, str | None, bool, list[str]]:
    """Formats of a pool's weights, the model of its command, whether it is quantised as it loads, and a note on it.

    Weights that are published in the planned format are named. Those in bf16 are quantised to FP8 as they load. Of
    others, and of models of no known name, the script asks for a folder.
    """
    name = (pool["engine"].get("kv_memory") or {}).get("model") or pool["step_time"].get("model")
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


def _vllm_flags(pool: Document, formats: Formats | None) -> list[str]:
    """The flags of an engine: those that the plan chose, and those whose defaults differ from the scenario's.

    Weights in few bits may come with scales of an FP8 cache, which vLLM uses unless the format is stated.
    """
    engine, step_time = pool["engine"], pool["step_time"]
    memory = engine.get("kv_memory") or {}
    ranks, stages = engine.get("data_parallel_size", 1), engine.get("pipeline_parallel_size", 1)
    words = ["--tensor-parallel-size", str(_degree(pool))]
    words += ["--pipeline-parallel-size", str(stages)] if stages > 1 else []
    words += ["--data-parallel-size", str(ranks)] if ranks > 1 else []
    words += ["--enable-expert-parallel"] if _spreads_experts(step_time) else []
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
        words += [f"--{name.replace('_', '-')}", str(engine.get(name, EngineSpec.model_fields[name].default))]
    if engine.get("num_gpu_blocks") is not None:
        words += ["--num-gpu-blocks-override", str(engine["num_gpu_blocks"] + NULL_BLOCKS)]
    else:
        words += ["--gpu-memory-utilization", str(memory.get("gpu_memory_utilization", 0.9))]
    eight_bits = memory.get("cache_bytes") == 1 or step_time.get("cache") == "fp8"
    usual = "auto" if _leaves_the_cache(pool, formats) else "bfloat16"
    words += ["--kv-cache-dtype", "fp8" if eight_bits else usual]
    words += ["--scheduling-policy", "priority"] if engine.get("scheduling_policy") == "priority" else []
    words.append(_switch("enable-prefix-caching", engine.get("enable_prefix_caching", True)))
    words.append(_switch("async-scheduling", engine.get("async_scheduling", False)))
    words.append(_switch("scheduler-reserve-full-isl", engine.get("scheduler_reserve_full_isl", True)))
    words += [] if engine.get("enable_chunked_prefill", True) else ["--no-enable-chunked-prefill"]
    for name in ("long_prefill_token_threshold", "watermark", "max_num_active_seqs", "prefill_schedule_interval"):
        if engine.get(name, default := EngineSpec.model_fields[name].default) != default:
            words += [f"--{name.replace('_', '-')}", str(engine[name])]
    return words + _lora(engine.get("lora_config"), ("--max-loras", "--max-cpu-loras"))


def _switch(name: str, on: bool) -> str:
    return f"--{name}" if on else f"--no-{name}"


def _degree(pool: Document) -> int:
    """Tensor parallelism of an engine, or of each of its data-parallel ranks."""
    engine = pool["engine"]
    stated = (engine.get("kv_memory") or {}).get("tensor_parallel_size") or pool["step_time"].get("tensor_parallel")
    ranks = engine.get("data_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    return int(stated or max(pool["device"]["count"] // ranks, 1))


def _leaves_the_cache(pool: Document, formats: Formats | None) -> bool:
    """True if the cache's format follows from the weights': these are bf16, or of a model that is not known at all."""
    name = (pool["engine"].get("kv_memory") or {}).get("model") or pool["step_time"].get("model")
    return str(formats) == "bf16" or not name


def _spreads_experts(step_time: Document) -> bool:
    """True if experts are whole on some device: a source says so, or their number of devices."""
    value = step_time.get("expert_parallel")
    return value is True or (value or 0) > 1


def _sglang_flags(pool: Document, formats: Formats | None) -> list[str]:
    """The flags of an engine in SGLang. Data-parallel attention divides the ranks of its tensor parallelism."""
    engine, step_time = pool["engine"], pool["step_time"]
    memory, fields = engine.get("kv_memory") or {}, EngineSpec.model_fields
    ranks, stages = engine.get("data_parallel_size", 1), engine.get("pipeline_parallel_size", 1)
    size, width = engine.get("block_size", fields["block_size"].default), _degree(pool) * ranks
    words = ["--tp-size", str(width)]
    words += ["--pp-size", str(stages)] if stages > 1 else []
    words += ["--attn-dp-size", str(ranks)] if ranks > 1 else []
    words += ["--ep-size", str(width)] if _spreads_experts(step_time) else []
    chunk = engine.get("max_num_batched_tokens", fields["max_num_batched_tokens"].default)
    words += ["--max-running-requests", str(engine.get("max_num_seqs", fields["max_num_seqs"].default))]
    words += ["--chunked-prefill-size", str(chunk if engine.get("enable_chunked_prefill", True) else -1)]
    words += ["--page-size", str(size)]
    if engine.get("num_gpu_blocks") is not None:
        words += ["--max-total-tokens", str(engine["num_gpu_blocks"] * size)]
    else:
        words += ["--mem-fraction-static", str(memory.get("gpu_memory_utilization", 0.9))]
    eight_bits = memory.get("cache_bytes") == 1 or step_time.get("cache") == "fp8"
    usual = "auto" if _leaves_the_cache(pool, formats) else "bf16"
    words += ["--kv-cache-dtype", "fp8_e4m3" if eight_bits else usual, "--schedule-policy", "fcfs"]
    words += ["--enable-priority-scheduling"] if engine.get("scheduling_policy") == "priority" else []
    words += [] if engine.get("enable_prefix_caching", True) else ["--disable-radix-cache"]
    words += [] if engine.get("async_scheduling", False) else ["--disable-overlap-schedule"]
    return words + _lora(engine.get("lora_config"), ("--max-loras-per-batch", "--max-loaded-loras"))


def _lora(section: Document | None, names: tuple[str, str]) -> list[str]:
    """Flags of adapters. `names`: of those in a step, and of those in host memory."""
    if section is None:
        return []
    words = ["--enable-lora", names[0], str(section.get("max_loras", 1))]
    words += ["--max-lora-rank", str(section.get("max_lora_rank", 16))]
    return words + ([names[1], str(section["max_cpu_loras"])] if section.get("max_cpu_loras") else [])


def _without_flags(program: str, engine: Document, translated: frozenset[str]) -> list[str]:
    """A note on fields of `engine` that differ from their defaults and have no flag."""
    fields = EngineSpec.model_fields
    changed = [name for name, value in engine.items() if name in fields and value not in (None, fields[name].default)]
    untranslated = [name for name in changed if name not in translated]
    if engine.get("kv_reservation") == "max_tokens":
        untranslated.append("kv_reservation: max_tokens")
    if engine.get("scheduling_policy", "fcfs") not in ("fcfs", "priority"):
        untranslated.append("scheduling_policy")
    return [f"{program} has no flag, or another form, for {', '.join(untranslated)}."] if untranslated else []


VLLM_IMAGE = "vllm/vllm-openai:v0.32.0"
ROUTER_IMAGE, ROUTER_PACKAGE = "python:3.12-slim", "vllm-router==0.1.17"
SIDECAR_IMAGE = "ghcr.io/llm-d/llm-d-routing-sidecar:v0.7.1"
DYNAMO_IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.3.0"
GPU = "nvidia.com/gpu"

COMPOSE = """\
# docker compose up: vLLM's engines on the ports of this machine, and a router in front on port 8000.
"""
SEVERAL = """\
# On machine i, with HOST_1, HOST_2, … set to the addresses of all: docker compose --profile machine-i up
"""
LLM_D = """\
# llm-d's model servers. Its router, which chooses {chooses}, comes from its chart:
#   helm install NAME oci://ghcr.io/llm-d/charts/llm-d-router-standalone -f VALUES.yaml
# with router.modelServers.matchLabels {{llm-d.ai/guide: serving-twin}}, and for prefill and decode apart the values of
# llm-d's guide pd-disaggregation. Needs the secret llm-d-hf-token with the key HF_TOKEN. Then: kubectl apply -f
"""
DYNAMO = """\
# A graph of NVIDIA Dynamo 1.3, whose operator must be in the cluster, with the secret hf-token-secret: kubectl apply -f
"""
REPLACE = "# Replace MODEL by the weights that were planned with.\n"


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
    """The engines of a plan.

    Attributes:
        commands: of its pools. places: of all engines. policy: of the router.
        apart: prefill and decode are engines of their own. bundles: pools of AFD bundles, which vLLM does not have.
    """

    commands: list[PoolCommand]
    places: list[Place]
    machines: int
    policy: str
    apart: bool
    bundles: list[str]

    @property
    def has_router(self) -> bool:
        """True if there is something to choose, and a decode engine for prefill engines."""
        return len(self.places) > 1 and (
            not self.apart or {place.role for place in self.places} >= {"prefill", "decode"}
        )

    @property
    def comments(self) -> str:
        """What a writer says first."""
        notes = [f"# Pool {command.pool}: {note}\n" for command in self.commands for note in command.notes]
        notes += [f"# Pool {name}: there is no command for AFD bundles.\n" for name in self.bundles]
        return "".join(notes) + (REPLACE if any(command.model is None for command in self.commands) else "")


def compose(deployment: Deployment) -> str:
    """A compose file with a service for each engine, and the router."""
    commands = {command.pool: command for command in deployment.commands}
    services: Document = {}
    for i, place in enumerate(deployment.places):
        command = commands[place.pool]
        environment = {"HF_TOKEN": "${HF_TOKEN:-}"}
        if deployment.apart:
            host = _host(place, deployment)
            environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.side_port)}
        gpus = {"driver": "nvidia", "device_ids": list(map(str, place.gpus)), "capabilities": ["gpu"]}
        services[f"{place.pool}-{i}"] = {
            "image": VLLM_IMAGE,
            "command": [command.model or "${MODEL:?}", *command.flags, "--port", str(place.port)],
            "network_mode": "host",
            "ipc": "host",
            "environment": environment,
            "volumes": ["${HF_HOME:-~/.cache/huggingface}:/root/.cache/huggingface"],
            "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
            **_profile(place.machine, deployment),
        }
    if deployment.has_router:
        services["router"] = _router(deployment)
    return COMPOSE + (SEVERAL if deployment.machines > 1 else "") + deployment.comments + write_yaml(
        {"services": services}
    )  # fmt: skip


def _router(deployment: Deployment) -> Document:
    """The service of the router, on the first machine."""
    words = ["exec vllm-router --host 0.0.0.0 --port 8000 --policy", deployment.policy]
    words.append("--vllm-pd-disaggregation" if deployment.apart else "--worker-urls")
    for place in deployment.places:
        url = f"http://{_host(place, deployment)}:{place.port}"
        words.append(f"--{place.role} {url}" if deployment.apart else url)
    start = f"pip install -q {ROUTER_PACKAGE} && {' '.join(words)}"
    return {
        "image": ROUTER_IMAGE, "command": ["sh", "-c", start], "network_mode": "host", **_profile(1, deployment),
    }  # fmt: skip


def _host(place: Place, deployment: Deployment) -> str:
    return f"${{HOST_{place.machine}:?}}" if deployment.machines > 1 else "localhost"


def _profile(machine: int, deployment: Deployment) -> Document:
    return {"profiles": [f"machine-{machine}"]} if deployment.machines > 1 else {}


def llm_d(deployment: Deployment) -> str:
    """A Deployment for each pool, with llm-d's labels; decode pods have its sidecar, which has prompts computed."""
    chooses = "a prefill and a decode pod for each request" if deployment.apart else "a pod for each request"
    documents = [write_yaml(_pods(command, deployment)) for command in deployment.commands]
    return LLM_D.format(chooses=chooses) + deployment.comments + "---\n".join(documents)


def _pods(command: PoolCommand, deployment: Deployment) -> Document:
    labels = {"llm-d.ai/guide": "serving-twin", "serving-twin/pool": command.pool}
    labels |= {"llm-d.ai/role": command.role} if deployment.apart else {}
    # The sidecar of a decode pod takes the port of requests, and passes them to the engine.
    has_sidecar = command.role == "decode"
    port = 8200 if has_sidecar else 8000
    token = {"secretKeyRef": {"name": "llm-d-hf-token", "key": "HF_TOKEN"}}
    address = {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    server = {
        "name": "modelserver",
        "image": VLLM_IMAGE,
        "command": ["vllm", "serve"],
        "args": [command.model or "MODEL", *command.flags, "--port", str(port)],
        "env": [{"name": "HF_TOKEN", "valueFrom": token}, *([address] if deployment.apart else [])],
        "ports": [{"containerPort": port, "name": "engine"}],
        "resources": {"limits": {GPU: str(command.devices)}},
        "startupProbe": {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 30, "failureThreshold": 120},
        "readinessProbe": {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 5},
        "volumeMounts": [{"mountPath": "/dev/shm", "name": "shm"}],
    }
    pod: Document = {"containers": [server]}
    if has_sidecar:
        words = ["--port=8000", f"--vllm-port={port}", "--kv-connector=nixlv2", "--secure-proxy=false"]
        sidecar = {"name": "routing-proxy", "image": SIDECAR_IMAGE, "args": words, "restartPolicy": "Always"}
        pod["initContainers"] = [{**sidecar, "ports": [{"containerPort": 8000, "name": "sidecar"}]}]
    pod["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "20Gi"}}]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"serving-twin-{command.pool}".lower().replace("_", "-"), "labels": labels},
        "spec": {
            "replicas": command.replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def dynamo(deployment: Deployment) -> str:
    """A DynamoGraphDeployment: a frontend, which routes, and a component for each pool."""
    front = {
        "name": "Frontend", "type": "frontend", "replicas": 1,
        "podTemplate": {"spec": {"containers": [{"name": "main", "image": DYNAMO_IMAGE}]}},
    }  # fmt: skip
    graph = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "serving-twin"},
        "spec": {"components": [front, *(_component(command) for command in deployment.commands)]},
    }
    return DYNAMO + deployment.comments + write_yaml(graph)


def _component(command: PoolCommand) -> Document:
    apart = command.role != "both"
    mode = ["--disaggregation-mode", command.role] if apart else []
    worker = {
        "name": "main",
        "image": DYNAMO_IMAGE,
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": ["--model", command.model or "MODEL", *mode, *command.flags],
        "envFrom": [{"secretRef": {"name": "hf-token-secret"}}],
        "resources": {"limits": {GPU: str(command.devices)}},
    }
    return {
        "name": command.pool, "type": command.role if apart else "worker", "replicas": command.replicas,
        "podTemplate": {"spec": {"containers": [worker]}},
    }  # fmt: skip
