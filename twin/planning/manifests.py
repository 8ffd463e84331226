"""A deployment in vLLM as a compose file, as Deployments of llm-d, and as a graph of Dynamo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from latency_models.io.config_io import write_yaml
from twin.planning.engine_commands import PoolCommand

Document = dict[str, Any]

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
