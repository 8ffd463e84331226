"""The recommended deployment as files: scenarios to simulate it, and what starts its engines: scripts and manifests.

Manifests are for docker compose, llm-d and Dynamo.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from latency_models.io.config_io import write_yaml
from reports.run_directory import naming, write_text
from twin.planning.cost import nodes_of
from twin.planning.given import moved
from twin.planning.launch import SGLANG, VLLM, Deployment, PoolCommand, deployment_of, launch_commands, live_commands

if TYPE_CHECKING:
    from twin.planning.planner import Planner

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

HEADER = """\
# The recommended deployment, in windows as it was planned with. The figures of the plan come from:
# twin simulate scenario.yaml --replications {windows}
# GPUs: {gpus}.
# A verdict on the running deployment: twin replay scenario.yaml --url http://localhost:8000 -o replayed{goals}
"""

HOST = "${{HOST_{}:?}}"
"""The variable of a machine's address."""


def write_deployment(planner: Planner, folder: Path) -> None:
    """Write `scenario.yaml`, scripts that launch it, a compose file and manifests into a folder.

    The folder is made. Paths in these files start from it.
    """
    question, best = planner.question, planner.best
    assert best is not None
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    simulated = question if best.seed is None else question.at_seed(best.seed)
    document = planner.evaluator(simulated).scenario(best.candidate, planner.horizon.long)
    scenario = moved(document, question.path.parent, folder)
    system, size = scenario["system"], question.spec.node_size
    deployment = deployment_of(system, folder, size)
    nodes = " and ".join(map(str, nodes_of(question, best.candidate)))
    goals = [goal for goal in question.goals if goal.of_whole_requests]  # which a replay decides
    header = HEADER.format(
        windows=len(best.windows),
        gpus=best.candidate.devices + (f" on {nodes}" if nodes else ""),
        goals="".join(f" --slo {goal.name}={goal.limit:g}{'s' if goal.at_most else ''}" for goal in goals),
    )
    texts = {
        "scenario.yaml": header + write_yaml(scenario),
        "launch.sh": launch_commands(system, folder, size),
        "launch_sglang.sh": launch_commands(system, folder, size, SGLANG),
        "serve_live.sh": live_commands(system),
        "compose.yaml": compose(deployment),
        "llm-d.yaml": llm_d(deployment),
        "dynamo.yaml": dynamo(deployment),
    }
    for name, text in texts.items():
        write_text(folder / name, text)


def _comments(deployment: Deployment) -> str:
    """The first lines of a manifest: settings that its commands lack, and bundles, which have none."""
    commands = deployment.commands.values()
    notes = [f"# Pool {command.pool['name']}: {note}\n" for command in commands for note in command.notes]
    bundles = [pool["name"] for pool in deployment.pools if pool["name"] not in deployment.commands]
    notes += [f"# Pool {name}: there is no command for AFD bundles.\n" for name in bundles]
    return "".join(notes) + (REPLACE if any(command.model is None for command in commands) else "")


def compose(deployment: Deployment) -> str:
    """A compose file with a service for each engine, and the router."""
    services: Document = {}
    for i, place in enumerate(deployment.places):
        command = deployment.commands[place.pool]
        environment = {"HF_TOKEN": "${HF_TOKEN:-}"}
        if deployment.apart:
            host = deployment.host(place, HOST)
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
        start = f"pip install -q {ROUTER_PACKAGE} && exec {deployment.router(VLLM, HOST)}"
        services["router"] = {
            "image": ROUTER_IMAGE, "command": ["sh", "-c", start], "network_mode": "host", **_profile(1, deployment),
        }  # fmt: skip
    header = COMPOSE + (SEVERAL if deployment.machines > 1 else "")
    return header + _comments(deployment) + write_yaml({"services": services})


def _profile(machine: int, deployment: Deployment) -> Document:
    return {"profiles": [f"machine-{machine}"]} if deployment.machines > 1 else {}


def llm_d(deployment: Deployment) -> str:
    """A Deployment for each pool, with llm-d's labels; decode pods have its sidecar, which has prompts computed."""
    chooses = "a prefill and a decode pod for each request" if deployment.apart else "a pod for each request"
    documents = [write_yaml(_pods(command, deployment)) for command in deployment.commands.values()]
    return LLM_D.format(chooses=chooses) + _comments(deployment) + "---\n".join(documents)


def _pods(command: PoolCommand, deployment: Deployment) -> Document:
    labels = {"llm-d.ai/guide": "serving-twin", "serving-twin/pool": command.pool["name"]}
    labels |= {"llm-d.ai/role": command.pool["role"]} if deployment.apart else {}
    # The sidecar of a decode pod takes the port of requests, and passes them to the engine.
    has_sidecar = command.pool["role"] == "decode"
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
        "resources": {"limits": {GPU: str(command.pool["device"]["count"])}},
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
        "metadata": {"name": f"serving-twin-{command.pool['name']}".lower().replace("_", "-"), "labels": labels},
        "spec": {
            "replicas": command.pool["replicas"],
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
        "spec": {"components": [front, *(_component(command) for command in deployment.commands.values())]},
    }
    return DYNAMO + _comments(deployment) + write_yaml(graph)


def _component(command: PoolCommand) -> Document:
    pool = command.pool
    apart = pool["role"] != "both"
    mode = ["--disaggregation-mode", pool["role"]] if apart else []
    worker = {
        "name": "main",
        "image": DYNAMO_IMAGE,
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": ["--model", command.model or "MODEL", *mode, *command.flags],
        "envFrom": [{"secretRef": {"name": "hf-token-secret"}}],
        "resources": {"limits": {GPU: str(pool["device"]["count"])}},
    }
    return {
        "name": pool["name"], "type": pool["role"] if apart else "worker", "replicas": pool["replicas"],
        "podTemplate": {"spec": {"containers": [worker]}},
    }  # fmt: skip
