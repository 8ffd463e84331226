"""Serving with several workers: starts them, or one of them. A topology that cannot be used raises `BadInput`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from live.loaded_model import ModelSource
from live.memory import check_memory
from live.models.linear import Rounding
from live.server.loading import BLOCK, ServedScenario
from live.server.options import EngineOptions, TopologyOptions, flag
from live.topologies.bundle.deployment import BundleDeployment
from live.topologies.bundle.layout import BundleLayout
from live.topologies.deployment import Deployment
from live.topologies.front import TopologyBackend
from live.topologies.in_process import InProcessWorkers
from live.topologies.membership import Address, Membership, listen_at
from live.topologies.pools.deployment import PoolsDeployment
from live.topologies.pools.layout import PoolsLayout, kv_bytes, pools_layout
from live.topologies.processes import LocalWorkers, TimeLimits, WorkerProcesses, run_worker, visible_gpus
from live.topologies.transport import TransportError
from scenarios.afd import AfdScenario, check_scenario, parse_ratios
from scenarios.validation import engine_pools
from schedulers.engine_config import EngineConfig
from workloads.errors import BadInput

PROMPT_TOKENS = 512
"""Prompt and decode tokens of one attention instance in one step of a microbatch, unless the user says otherwise."""

MAX_SECONDS = 86400.0
"""Maximum of time limits."""


Serve: TypeAlias = Callable[[TopologyBackend], int]
"""Serves a backend over HTTP until a shutdown; returns the exit code."""


def refuse(options: TopologyOptions) -> None:
    values: dict[str, object] = {"--role": options.role, "--rendezvous": options.rendezvous}
    values |= {"--module": _first_module(options), "--decoder-bits": options.decoder_bits}
    values |= {"--in-process": options.in_process or None}
    for field, value in values.items():
        if value is not None:
            raise BadInput("expected it beside --scenario of a topology", field=field, value=value)


def plan_topology(
    scenario: ServedScenario, model: ModelSource, engine: EngineOptions, options: TopologyOptions
) -> Deployment:
    """The pools of engines or the bundle that a scenario describes."""
    if (ranks := engine.tensor_parallel_size) not in (None, 1):
        raise BadInput(
            "expected 1: a topology's workers have one rank each", field="--tensor-parallel-size", value=ranks
        )
    plan = _plan_bundle if scenario.serving is None else _plan_pools
    deployment = plan(scenario, model, engine, options)
    if deployment.config.labels:
        raise BadInput("expected a model that generates tokens, which one that classifies does not", file=model.path)
    return deployment


def serve_topology(
    deployment: Deployment, model: ModelSource, engine: EngineOptions, options: TopologyOptions, serve: Serve
) -> int:
    """Serve with a topology, or be one of its workers; returns the exit code."""
    names, limits = deployment.names, _time_limits(options)
    if options.in_process:
        return _serve_in_process(deployment, options, serve)
    rank = 0 if options.role is None else _rank(options, names)
    address = Address("127.0.0.1", 0) if options.rendezvous is None else Address.parse(options.rendezvous)
    worker_options = _worker_options(model, engine, options) if options.role is None else None
    try:
        if rank:
            if options.rendezvous is None:
                raise BadInput("expected it beside --role, where the coordinator or frontend is", field="--rendezvous")
            run_worker(deployment, rank, address, limits)
            return 0
        return _serve_front(deployment, address, worker_options, limits, serve)
    except TransportError as error:
        print(f"serve-live: {error}", file=sys.stderr, flush=True)
        return 1


def _serve_in_process(deployment: Deployment, options: TopologyOptions, serve: Serve) -> int:
    """Load the models of all workers into this process, and serve."""
    for field, value in (("--role", options.role), ("--rendezvous", options.rendezvous)):
        if value is not None:
            raise BadInput("expected none beside --in-process", field=field, value=value)
    with closing(TopologyBackend(deployment, InProcessWorkers(deployment))) as backend:
        return serve(backend)


def _serve_front(
    deployment: Deployment, address: Address, worker_options: list[str] | None, limits: TimeLimits, serve: Serve
) -> int:
    """Start the workers of this machine, wait for all, and serve.

    `worker_options`: None if the workers are started by themselves.
    """
    names = deployment.names
    with ExitStack() as stack:
        listener = stack.enter_context(listen_at(address))
        members = Membership(address, 0, names, deployment.fingerprint, listener=listener, join_seconds=limits.join)
        workers = None
        if worker_options is not None:
            command = [sys.executable, "-m", "live.server", *worker_options, "--rendezvous", str(members.meeting_point)]
            places = {rank: names[rank].split() for rank in range(1, len(names))}
            commands = {rank: [*command, "--role", role, "--rank", number] for rank, (role, number) in places.items()}
            workers = LocalWorkers(commands, names, visible_gpus(commands) if deployment.device != "cpu" else {})
            stack.callback(workers.close)
            members.watch = workers.check
            members.extend(limits.join * len(names))  # workers of one machine share its processors to start
        stack.callback(members.close)
        members.gather()
        members.ready()
        backend = TopologyBackend(deployment, WorkerProcesses(deployment, members, workers, limits))
        stack.callback(backend.close)
        return serve(backend)


def _rank(options: TopologyOptions, names: list[str]) -> int:
    roles = list(dict.fromkeys(name.split()[0] for name in names))
    if options.role not in roles:
        raise BadInput(f"expected {', '.join(roles)}", field="--role", value=options.role)
    ranks = [i for i, name in enumerate(names) if name.split()[0] == options.role]
    if not 0 <= options.rank < len(ranks):
        raise BadInput(f"expected 0 to {len(ranks) - 1}, of {options.role}", field="--rank", value=options.rank)
    return ranks[options.rank]


def _time_limits(options: TopologyOptions) -> TimeLimits:
    for name in ("join_seconds", "worker_seconds"):
        if not 0 < (value := getattr(options, name)) <= MAX_SECONDS:
            raise BadInput(f"expected a number above 0, of at most {MAX_SECONDS:g}", field=flag(name), value=value)
    return TimeLimits(options.join_seconds, options.worker_seconds)


def _plan_bundle(
    scenario: ServedScenario, model: ModelSource, engine: EngineOptions, options: TopologyOptions
) -> Deployment:
    spec = check_scenario(scenario.document, scenario.settings, scenario.path)
    for field, value in (("--module", _first_module(options)), ("--decoder-bits", options.decoder_bits)):
        if value is not None:
            raise BadInput("expected none: a bundle serves one model", field=field, value=value)
    return BundleDeployment(model, _bundle_layout(spec, model, engine, scenario.path), spec.refill)


def _plan_pools(
    scenario: ServedScenario, model: ModelSource, engine: EngineOptions, options: TopologyOptions
) -> Deployment:
    engine.refuse_settings(
        "expected none beside --scenario, which has the engines' settings: change them by --set engine.…"
    )
    spec, pools = engine_pools(scenario.document, scenario.settings, scenario.path)
    layout, chunks = pools_layout(spec, pools)
    modules = _modules(spec.model_names, options.module or [], model)
    deployment = PoolsDeployment(_shared_decoder(model, layout, options.decoder_bits), layout, modules, chunks)
    row = kv_bytes(deployment.config, model.dtype)
    for place in layout.engines:
        blocks, field = place.config.num_gpu_blocks, "engine.num_gpu_blocks or engine.kv_memory"
        size = blocks * place.config.block_size * row
        check_memory(size, f"KV caches of a {place.role} engine", model.device, field=field, value=blocks)
    return deployment


def _shared_decoder(model: ModelSource, layout: PoolsLayout, bits: int | None) -> ModelSource:
    """The decoder that several models share, rounded to this many bits."""
    if bits is None:
        return model
    if bits not in (3, 4):
        raise BadInput("expected 3 or 4", field="--decoder-bits", value=bits)
    if len(layout.prefill) == 1 or all(place.module is not None for place in layout.engines):
        expected = "expected it beside several models with a shared decode pool"
        raise BadInput(expected, field="--decoder-bits", value=bits)
    return replace(model, rounding=Rounding(bits))


def _bundle_layout(spec: AfdScenario, model: ModelSource, engine: EngineOptions, file: Path) -> BundleLayout:
    """The sizes of the bundle that a scenario describes."""
    ratios = parse_ratios(spec.ratio)
    if len(ratios) != 1:
        expected = "expected one ratio to serve with, such as --set ratio=2"
        raise BadInput(expected, field="ratio", value=spec.ratio, file=file)
    engine.refuse_settings(
        "expected none beside a scenario of a bundle, which says it or has no such thing",
        accepted=("max_num_batched_tokens", "num_gpu_blocks"),
    )
    config, batch_size, topology = model.config(), spec.batch_size, ratios[0]
    blocks, tokens = engine.num_gpu_blocks, engine.max_num_batched_tokens
    field = "batch_size" if blocks is None else "--num-gpu-blocks"
    blocks = batch_size * -(-config.max_position_embeddings // BLOCK) if blocks is None else blocks
    tokens = max(PROMPT_TOKENS, batch_size) if tokens is None else tokens
    cache_bytes = blocks * BLOCK * kv_bytes(config, model.dtype) * spec.microbatches * topology.attention_instances
    check_memory(cache_bytes, "KV caches of all attention instances", model.device, field=field, value=blocks)
    try:
        settings = EngineConfig(
            num_gpu_blocks=blocks, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=batch_size,
            max_num_batched_tokens=tokens,
        )  # fmt: skip
    except ValueError as error:
        raise BadInput(str(error), field="engine") from None
    return BundleLayout(topology.attention_instances, topology.ffn_instances, spec.microbatches, settings)


def _modules(names: list[str], modules: list[str], model: ModelSource) -> dict[str, ModelSource]:
    """The weights of each of several models: given by NAME=PATH, or random ones of a seed of their own."""
    paths = {}
    for entry in modules:
        name, separator, path = entry.partition("=")
        if not separator or name not in names or len(names) == 1:
            choices = ", ".join(names[:10]) if len(names) > 1 else "a scenario with several models"
            raise BadInput(f"expected NAME=PATH, with a name of {choices}", field="--module", value=entry)
        paths[name] = replace(model, path=Path(path))
    if len(names) == 1:
        return {}
    sources = {}
    for i, name in enumerate(names):
        source = paths.get(name)
        if source is None and not model.random:
            raise BadInput(f"expected {name}=PATH, the weights of each model of the scenario", field="--module")
        sources[name] = source or replace(model, seed=model.seed + 1 + i)
        if sources[name].config().shape != model.config().shape:
            expected = "expected the shape of --model, whose decoder reads its cache"
            raise BadInput(expected, field="--module", value=name, file=sources[name].path)
    return sources


def _worker_options(model: ModelSource, engine: EngineOptions, options: TopologyOptions) -> list[str]:
    """The command line of a worker, besides its place: the same model and settings."""
    assert engine.scenario is not None
    words = [
        "--model", str(model.path.resolve()), "--dtype", model.dtype, "--device", model.device,
        "--threads", str(model.threads), "--scenario", str(engine.scenario.resolve()),
        "--join-seconds", str(options.join_seconds), "--worker-seconds", str(options.worker_seconds),
    ]  # fmt: skip
    if model.random:
        words.append("--random-weights")
    for name, value in engine.settings.items():
        words += [flag(name), str(value)]
    for change in engine.set_ or []:
        words += ["--set", change]
    for module in options.module or []:
        words += ["--module", module]
    if options.decoder_bits is not None:
        words += ["--decoder-bits", str(options.decoder_bits)]
    return words


def _first_module(options: TopologyOptions) -> str | None:
    return options.module[0] if options.module else None
