"""The recommended deployment as files: scenarios to simulate it, and what starts its engines."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latency_models.io.config_io import write_yaml
from reports.run_directory import naming, write_text
from twin.planning.cost import node_size as known_node_size
from twin.planning.cost import nodes_of, place
from twin.planning.given import moved
from twin.planning.manifests import Deployment, Place, PoolCommand, compose, dynamo, llm_d, sglang_command, vllm_command

if TYPE_CHECKING:
    from twin.planning.planner import Planner
    from twin.planning.question import Question
    from twin.planning.windows import Trial

Document = dict[str, Any]

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


@dataclass(frozen=True)
class Program:
    """How the script of an engine program starts engines and a router.

    Attributes:
        command: of a pool. serve: what stands before the model. apart: after the flags of engines that prefill.
        router: its program, and the flag that says that prefill and decode are apart.
        bootstrap: the router knows ports of handshakes.
    """

    header: str
    command: Callable[..., PoolCommand]
    serve: str
    environment: str
    prefill: str
    router: str
    apart: str
    bootstrap: bool


VLLM = Program(
    WRITTEN_FOR, vllm_command, "vllm serve",
    'VLLM_NIXL_SIDE_CHANNEL_HOST="$3" VLLM_NIXL_SIDE_CHANNEL_PORT="$4" ', "", "vllm-router",
    "--vllm-pd-disaggregation", bootstrap=False,
)  # fmt: skip

SGLANG = Program(
    WRITTEN_FOR_SGLANG, sglang_command, "python -m sglang.launch_server --host 0.0.0.0 --model-path", "",
    ' --disaggregation-bootstrap-port "$4"', "python -m sglang_router.launch_router", "--pd-disaggregation",
    bootstrap=True,
)  # fmt: skip


def write_deployment(planner: Planner, folder: Path) -> None:
    """Write `scenario.yaml`, scripts that launch it, a compose file and manifests into a folder.

    The folder is made. Paths in these files start from it.
    """
    best = planner.best
    assert best is not None
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    scenario = _simulated(planner, best, folder)
    write_text(folder / "scenario.yaml", _header(planner.question, best) + write_yaml(scenario))
    system, size = scenario["system"], planner.question.spec.node_size
    write_text(folder / "launch.sh", launch_commands(system, folder, size))
    write_text(folder / "launch_sglang.sh", launch_commands(system, folder, size, SGLANG))
    write_text(folder / "serve_live.sh", serve_live_commands(system))
    deployment = deployment_of(system, folder, size)
    for name, write in (("compose", compose), ("llm-d", llm_d), ("dynamo", dynamo)):
        write_text(folder / f"{name}.yaml", write(deployment))


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
        "# A verdict on the running deployment: twin replay scenario.yaml --url http://localhost:8000 -o replayed"
        f"{_goals(question)}\n"
    )


def _goals(question: Question) -> str:
    """Flags of the goals that a replay decides."""
    goals = [goal for goal in question.goals if goal.of_whole_requests]
    return "".join(f" --slo {goal.name}={goal.limit:g}{'s' if goal.at_most else ''}" for goal in goals)


def launch_commands(system: Document, base: Path, node_size: int | None = None, program: Program = VLLM) -> str:
    """A shell script that starts every engine of a machine, and on the first one the router in front.

    Args:
        base: the script's folder, where relative paths in `system` start. node_size: GPUs of a machine, if stated.
    """
    pools = [USUAL_POOL | pool for pool in system["pools"]]
    apart = any(pool["role"] != "both" for pool in pools)
    engines, machines = _placed(pools, base, node_size)
    parts = [program.header]
    if machines > 1:
        parts.append(f': "${{MACHINE:?expected the number of this machine, from 1 to {machines}}}"\n')
        parts += [f': "${{HOST_{i + 1}:?expected the address of machine {i + 1}}}"\n' for i in range(machines)]
    for pool in pools:
        parts.append("\n" + _pool_commands(pool, base, program, apart=apart, node_size=_machine(pool, base, node_size)))
    lines = [_start(engine, several=machines > 1, apart=apart) for engine in engines]
    parts.append("\n# Pool, GPUs, port" + (", address, port of handshakes.\n" if apart else ".\n"))
    parts.append("".join(f"{line} &\n" for line in lines))
    if len(engines) > 1 and (not apart or {engine.role for engine in engines} == {"prefill", "decode"}):
        parts.append(f"\n# The router, port {ROUTER_PORT}.\n")
        parts.append(_router(engines, program, _policy(system), several=machines > 1, apart=apart) + " &\n")
    return "".join(parts) + "wait\n"


def _placed(pools: list[Document], base: Path, node_size: int | None) -> tuple[list[Place], int]:
    """The engines at their places, and the number of machines; bundles are left out."""
    members = [
        (pool, pool["device"]["count"], _machine(pool, base, node_size))
        for pool in pools
        if not _is_bundle(pool)
        for _ in range(pool["replicas"])
    ]
    places = place((pool["device"]["type"], count, size) for pool, count, size in members)
    engines: list[Place] = []
    side_port = FIRST_SIDE_PORT
    for i, ((pool, count, _), spot) in enumerate(zip(members, places, strict=True)):
        gpus = list(range(spot.first, spot.first + count))
        engines.append(Place(pool["name"], pool["role"], spot.node, gpus, FIRST_PORT + i, side_port))
        side_port += pool["engine"].get("data_parallel_size", 1)
    return engines, max((spot.node + spot.span - 1 for spot in places), default=1)


def _machine(pool: Document, base: Path, stated: int | None) -> int:
    """GPUs of a machine."""
    return known_node_size(pool["step_time"], base, stated) or USUAL_MACHINE


def _start(engine: Place, *, several: bool, apart: bool) -> str:
    """The line that starts an engine."""
    prefix = f'[ "$MACHINE" = {engine.machine} ] && ' if several else ""
    gpus = ",".join(map(str, engine.gpus))
    address = f" {_host(engine, several=several)} {engine.side_port}" if apart else ""
    return f"{prefix}{_function(engine.pool)} {gpus} {engine.port}{address}"


def _host(engine: Place, *, several: bool) -> str:
    return f'"$HOST_{engine.machine}"' if several else "localhost"


def _function(pool: str) -> str:
    return "start_" + "".join(character if character.isalnum() else "_" for character in pool)


def _router(engines: list[Place], program: Program, policy: str, *, several: bool, apart: bool) -> str:
    """The command of the router, on the first machine."""
    prefix = '[ "$MACHINE" = 1 ] && ' if several else ""
    urls = [f"http://{_host(engine, several=several)}:{engine.port}" for engine in engines]
    words = [f"{prefix}{program.router} --host 0.0.0.0 --port {ROUTER_PORT} --policy {policy}"]
    if not apart:
        return " ".join([*words, "--worker-urls", *urls])
    words.append(program.apart)
    for engine, url in zip(engines, urls, strict=True):
        port = f" {engine.side_port}" if program.bootstrap and engine.role == "prefill" else ""
        words.append(f"--{engine.role} {url}{port}")
    return " ".join(words)


def _policy(system: Document) -> str:
    routing = system.get("routing", "least_loaded")
    return POLICIES.get(str(routing.get("policy") if isinstance(routing, dict) else routing), "power_of_two")


def _pool_commands(pool: Document, base: Path, program: Program, *, apart: bool, node_size: int) -> str:
    """A function that starts an engine of a pool."""
    role = "" if pool["role"] == "both" else f" ({pool['role']})"
    title = f"# Pool {pool['name']}{role}: {pool['replicas']} engine{'s' if pool['replicas'] > 1 else ''}.\n"
    if _is_bundle(pool):
        attention, ffn = (pool["step_time"].get(f"{side}_instances", 1) for side in ("attention", "ffn"))
        return f"{title}# There is no command for a bundle of {attention} attention and {ffn} FFN instances.\n"
    command = program.command(pool, base, apart=apart)
    notes = list(command.notes)
    if pool["device"]["count"] > node_size:
        notes.append("An engine spans machines: add --nnodes, --node-rank and --master-addr on each of them.")
    model = MODEL_VARIABLE if command.model is None else shlex.quote(command.model)
    environment = program.environment if apart else ""
    side = program.prefill if pool["role"] == "prefill" else ""
    body = (
        f'CUDA_VISIBLE_DEVICES="$1" {environment}{program.serve} {model} {shlex.join(command.flags)} --port "$2"{side}'
    )
    return title + "".join(f"# {note}\n" for note in notes) + f"{_function(pool['name'])}() {{\n    {body}\n}}\n"


def deployment_of(system: Document, base: Path, node_size: int | None = None) -> Deployment:
    """The engines that start in vLLM, with their places, for the writers of manifests."""
    pools = [USUAL_POOL | pool for pool in system["pools"]]
    apart = any(pool["role"] != "both" for pool in pools)
    engines, machines = _placed(pools, base, node_size)
    bundles = [pool["name"] for pool in pools if _is_bundle(pool)]
    commands = [vllm_command(pool, base, apart=apart) for pool in pools if not _is_bundle(pool)]
    return Deployment(commands, engines, machines, _policy(system), apart, bundles)


def _is_bundle(pool: Document) -> bool:
    return bool(pool["step_time"].get("source") == "afd_bundle")


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
        lines.append("# Live engines have the plan's tensor parallelism; those of several pools have one device each.")
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
