"""Serving with several workers: the command that starts them, or one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from live.loaded_model import DTYPES, ModelSource
from live.memory import check_memory
from live.models.config import ModelConfig
from live.server.options import EngineOptions, TopologyOptions, flag
from live.topologies.bundle.deployment import BundleDeployment
from live.topologies.bundle.layout import BundleLayout
from live.topologies.deployment import Deployment
from live.topologies.front import TopologyBackend
from live.topologies.membership import Address, Membership, listen_at
from live.topologies.pools.deployment import PoolsDeployment
from live.topologies.pools.layout import EnginePlace, PoolsLayout
from live.topologies.processes import LocalWorkers, TimeLimits, run_worker
from live.topologies.transport import TransportError
from scenarios.afd import AfdScenario, check_scenario
from scenarios.engine_pools import EnginePool, engine_pools
from scenarios.kinds import read_scenario
from scenarios.overrides import single_settings
from scenarios.ratios import parse_ratios
from scenarios.serving import ServingScenario
from scenarios.serving import check_scenario as check_serving
from schedulers.chunking import ChunkPolicy
from schedulers.engine_config import EngineConfig
from workloads.errors import BadInput

BLOCK = 16
"""Block size of the KV cache, tokens."""

PROMPT_TOKENS = 512
"""Prompt and decode tokens of one attention instance in one step of a microbatch, unless the user says otherwise."""

MAX_SECONDS = 86400.0
"""Maximum of time limits."""


Serve: TypeAlias = Callable[[TopologyBackend], int]
"""Serves a backend over HTTP until a shutdown; returns the exit code."""


def refuse(options: TopologyOptions) -> None:
    """Refuse options of a topology where there is none.

    Raises:
        BadInput: a role, a rendezvous or a module is given.
    """
    module = options.module[0] if options.module else None
    for field, value in (("--role", options.role), ("--rendezvous", options.rendezvous), ("--module", module)):
        if value is not None:
            raise BadInput("expected it beside --scenario of a topology", field=field, value=value)


def is_topology(scenario: Path, changes: list[str]) -> bool:
    """Return whether a scenario has several kinds of workers: a bundle, or more than one pool of engines.

    Raises:
        BadInput: the scenario cannot be used.
    """
    document = read_scenario(scenario, "serving", "afd-bundle")
    if document["kind"] == "afd-bundle":
        return True
    return len(check_serving(document, single_settings(changes), scenario).pools) > 1


def serve_scenario(model: ModelSource, engine: EngineOptions, options: TopologyOptions, serve: Serve) -> int:
    """Serve with the topology of a scenario, or be one of its workers; returns the exit code.

    Raises:
        BadInput: a scenario, a model or options that cannot be used.
    """
    assert engine.scenario is not None
    document = read_scenario(engine.scenario, "serving", "afd-bundle")
    deployment: Deployment
    if document["kind"] == "afd-bundle":
        deployment = _plan_bundle(document, model, engine, options)
    else:
        deployment = _plan_pools(document, model, engine, options)
    if deployment.config.labels:
        raise BadInput("expected a model that generates tokens, which one that classifies does not", file=model.path)
    return serve_topology(deployment, options, _worker_options(model, engine, options), serve)


def serve_topology(deployment: Deployment, options: TopologyOptions, worker_options: list[str], serve: Serve) -> int:
    """Serve with a topology, or be one of its workers; returns the exit code.

    Args:
        worker_options: a worker's command line, besides its role, rank and rendezvous.
    """
    names, limits = deployment.names, _time_limits(options)
    rank = 0 if options.role is None else _rank(options, names)
    address = Address("127.0.0.1", 0) if options.rendezvous is None else Address.parse(options.rendezvous)
    try:
        if rank:
            if options.rendezvous is None:
                raise BadInput("expected it beside --role, where the coordinator or frontend is", field="--rendezvous")
            run_worker(deployment, rank, address, limits)
            return 0
        return _serve_front(deployment, address, worker_options if options.role is None else None, limits, serve)
    except TransportError as error:
        print(f"serve-live: {error}", file=sys.stderr, flush=True)
        return 1


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
            own = [sys.executable, "-m", "live.server", *worker_options, "--rendezvous", str(members.meeting_point)]
            places = {rank: names[rank].split() for rank in range(1, len(names))}
            commands = {rank: [*own, "--role", role, "--rank", number] for rank, (role, number) in places.items()}
            workers = LocalWorkers(commands, names)
            stack.callback(workers.close)
            members.watch = workers.check
            members.extend(limits.join * len(names))  # workers of one machine share its processors to start
        stack.callback(members.close)
        members.gather()
        members.ready()
        backend = TopologyBackend(deployment, members, workers, limits)
        stack.callback(backend.close)
        return serve(backend)


def _rank(options: TopologyOptions, names: list[str]) -> int:
    """This process's rank among all.

    Raises:
        BadInput: no such role or rank.
    """
    roles = list(dict.fromkeys(name.split()[0] for name in names))
    if options.role not in roles:
        raise BadInput(f"expected {', '.join(roles)}", field="--role", value=options.role)
    ranks = [i for i, name in enumerate(names) if name.split()[0] == options.role]
    if not 0 <= options.rank < len(ranks):
        raise BadInput(f"expected 0 to {len(ranks) - 1}, of {options.role}", field="--rank", value=options.rank)
    return ranks[options.rank]


def _time_limits(options: TopologyOptions) -> TimeLimits:
    """The time limits.

    Raises:
        BadInput: one that is no time.
    """
    for name in ("join_seconds", "worker_seconds"):
        if not 0 < (value := getattr(options, name)) <= MAX_SECONDS:
            raise BadInput(f"expected a number above 0, of at most {MAX_SECONDS:g}", field=flag(name), value=value)
    return TimeLimits(options.join_seconds, options.worker_seconds)


def _plan_bundle(
    document: dict[str, Any], model: ModelSource, engine: EngineOptions, options: TopologyOptions
) -> BundleDeployment:
    """The bundle that a scenario describes.

    Raises:
        BadInput: a scenario that cannot be used, or options that a bundle does not have.
    """
    assert engine.scenario is not None
    spec = check_scenario(document, single_settings(engine.set_ or []), engine.scenario)
    if options.module:
        raise BadInput("expected none: a bundle serves one model", field="--module", value=options.module[0])
    return BundleDeployment(model, _bundle_layout(spec, model, engine, engine.scenario), spec.refill)


def _plan_pools(
    document: dict[str, Any], model: ModelSource, engine: EngineOptions, options: TopologyOptions
) -> PoolsDeployment:
    """The pools of engines that a scenario describes.

    Raises:
        BadInput: a scenario that cannot be used, flags of the engine, models without weights, or more memory than there
            is.
    """
    assert engine.scenario is not None
    for name, value in engine.settings.items():
        expected = "expected none beside --scenario, which has the engines' settings: change them by --set engine.…"
        raise BadInput(expected, field=flag(name), value=value)
    spec, pools = engine_pools(document, single_settings(engine.set_ or []), engine.scenario)
    layout, chunks = _pools_layout(spec, pools)
    deployment = PoolsDeployment(model, layout, _modules(spec.model_names, options.module or [], model), chunks)
    row = _kv_bytes(deployment.config, model)
    for place in layout.engines:
        blocks, field = place.config.num_gpu_blocks, "engine.num_gpu_blocks or engine.kv_memory"
        size = blocks * place.config.block_size * row
        check_memory(size, f"KV caches of a {place.role} engine", model.device, field=field, value=blocks)
    return deployment


def _bundle_layout(spec: AfdScenario, model: ModelSource, engine: EngineOptions, file: Path) -> BundleLayout:
    """The sizes of the bundle that a scenario describes.

    Raises:
        BadInput: several ratios, flags that a bundle does not have, or more memory than there is.
    """
    ratios = parse_ratios(spec.ratio)
    if len(ratios) != 1:
        expected = "expected one ratio to serve with, such as --set ratio=2"
        raise BadInput(expected, field="ratio", value=spec.ratio, file=file)
    for name, value in engine.settings.items():
        if name not in ("max_num_batched_tokens", "num_gpu_blocks"):
            expected = "expected none beside a scenario of a bundle, which says it or has no such thing"
            raise BadInput(expected, field=flag(name), value=value)
    config, batch_size, topology = model.config(), spec.batch_size, ratios[0]
    blocks, tokens = engine.num_gpu_blocks, engine.max_num_batched_tokens
    field = "batch_size" if blocks is None else "--num-gpu-blocks"
    blocks = batch_size * -(-config.max_position_embeddings // BLOCK) if blocks is None else blocks
    tokens = max(PROMPT_TOKENS, batch_size) if tokens is None else tokens
    here = blocks * BLOCK * _kv_bytes(config, model) * spec.microbatches * topology.attention_instances
    check_memory(here, "KV caches of all attention instances", model.device, field=field, value=blocks)
    try:
        settings = EngineConfig(
            num_gpu_blocks=blocks, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=batch_size,
            max_num_batched_tokens=tokens,
        )  # fmt: skip
    except ValueError as error:
        raise BadInput(str(error), field="engine") from None
    return BundleLayout(topology.attention_instances, topology.ffn_instances, spec.microbatches, settings)


def _kv_bytes(config: ModelConfig, model: ModelSource) -> int:
    """Bytes of KV cache of one token."""
    shape = config.shape
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPES[model.dtype].itemsize


def _modules(names: list[str], modules: list[str], model: ModelSource) -> dict[str, ModelSource]:
    """The weights of each of several models: given by NAME=PATH, or random ones of a seed of their own.

    Raises:
        BadInput: a name that the scenario does not have, a model without weights, or modules of another shape.
    """
    given = {}
    for entry in modules:
        name, separator, path = entry.partition("=")
        if not separator or name not in names or len(names) == 1:
            known = ", ".join(names[:10]) if len(names) > 1 else "a scenario with several models"
            raise BadInput(f"expected NAME=PATH, with a name of {known}", field="--module", value=entry)
        given[name] = replace(model, path=Path(path))
    if len(names) == 1:
        return {}
    sources = {}
    for i, name in enumerate(names):
        source = given.get(name)
        if source is None and not model.random:
            raise BadInput(f"expected {name}=PATH, the weights of each model of the scenario", field="--module")
        sources[name] = source or replace(model, seed=model.seed + 1 + i)
        if sources[name].config().shape != model.config().shape:
            expected = "expected the shape of --model, whose decoder reads its cache"
            raise BadInput(expected, field="--module", value=name, file=sources[name].path)
    return sources


def _pools_layout(
    spec: ServingScenario, pools: list[EnginePool]
) -> tuple[PoolsLayout, tuple[Callable[[], ChunkPolicy | None], ...]]:
    """The engines of a scenario, and what makes the chunk policy of each."""
    models = spec.model_names
    engines: list[EnginePlace] = []
    chunks: list[Callable[[], ChunkPolicy | None]] = []
    ranks: dict[str, dict[str, tuple[int, ...]]] = {"prefill": {}, "decode": {}}
    for pool in pools:
        known: dict[str, int] = {}
        own = pool.spec.models == "each" and len(models) > 1
        side = ranks["decode" if pool.spec.role == "decode" else "prefill"]
        for model, names in pool.spec.engine_names(models).items():
            for name in names:
                if name not in known:
                    engines.append(EnginePlace(pool.spec.role, pool.scheduler.config, model if own else None))
                    chunks.append(pool.scheduler.chunk_policy)
                    known[name] = len(engines)
            side[model] = side.get(model, ()) + tuple(known[name] for name in names)
    routing = spec.system.routing
    return PoolsLayout(tuple(engines), ranks["prefill"], ranks["decode"], routing), tuple(chunks)


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
    return words
