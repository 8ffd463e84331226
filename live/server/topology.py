"""Serving with several workers: the command that starts them, or one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from latency_models.io.config_io import read_yaml
from live.loaded_model import DTYPES, ModelSource
from live.memory import check_memory
from live.server.flags import EngineFlags
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


@dataclass(frozen=True)
class Place:
    """Which process of a topology this is, and where they meet: options of the command line."""

    role: str | None
    rank: int
    rendezvous: str | None
    join_seconds: float
    worker_seconds: float

    def refuse(self, modules: list[str]) -> None:
        """Refuse a place, and modules, without a topology.

        Raises:
            BadInput: a role, a rendezvous or a module is given.
        """
        given = ("--role", self.role), ("--rendezvous", self.rendezvous), ("--module", modules[0] if modules else None)
        for field, value in given:
            if value is not None:
                raise BadInput("expected it beside --scenario of a topology", field=field, value=value)

    @property
    def limits(self) -> TimeLimits:
        """The time limits.

        Raises:
            BadInput: one that is no time.
        """
        for field, value in (("--join-seconds", self.join_seconds), ("--worker-seconds", self.worker_seconds)):
            if not 0 < value <= 86400:
                raise BadInput("expected a number above 0, of at most 86400", field=field, value=value)
        return TimeLimits(self.join_seconds, self.worker_seconds)

    def global_rank(self, names: list[str]) -> int:
        """This process's rank among all.

        Raises:
            BadInput: no such role or rank.
        """
        roles = list(dict.fromkeys(name.split()[0] for name in names))
        if self.role not in roles:
            raise BadInput(f"expected {', '.join(roles)}", field="--role", value=self.role)
        ranks = [i for i, name in enumerate(names) if name.split()[0] == self.role]
        if not 0 <= self.rank < len(ranks):
            raise BadInput(f"expected 0 to {len(ranks) - 1}, of {self.role}", field="--rank", value=self.rank)
        return ranks[self.rank]


def kind_of(scenario: Path) -> object:
    """The `kind` of a scenario file, whatever it is."""
    return read_yaml(scenario).get("kind")


def serve_bundle(
    model: ModelSource,
    flags: EngineFlags,
    scenario: Path,
    changes: list[str],
    place: Place,
    serve: Callable[[TopologyBackend], int],
) -> int:
    """Serve with an attention/FFN bundle, or be one of its workers; returns the exit code.

    Args:
        changes: of the scenario, key=value. serve: serves a backend over HTTP until a shutdown.

    Raises:
        BadInput: a scenario, a model or a place that cannot be used.
    """
    document = read_scenario(scenario, "afd-bundle")
    spec = check_scenario(document, single_settings(changes), scenario)
    deployment = BundleDeployment(model, _layout(spec, model, flags, scenario), spec.refill)
    options = _worker_options(model, flags, scenario, changes, place)
    return serve_topology(deployment, place, options, serve)


def serve_pools(
    model: ModelSource,
    modules: list[str],
    flags: EngineFlags,
    scenario: Path,
    changes: list[str],
    place: Place,
    serve: Callable[[TopologyBackend], int],
) -> int:
    """Serve with the pools of engines of a scenario, or be one of the engines; returns the exit code.

    Args:
        modules: NAME=PATH, the weights of each of several models.

    Raises:
        BadInput: a scenario, a model or a place that cannot be used.
    """
    for name, value in asdict(flags).items():
        if value is not None:
            expected = "expected none beside --scenario, which has the engines' settings: change them by --set engine.…"
            raise BadInput(expected, field=f"--{name.replace('_', '-')}", value=value)
    document = read_scenario(scenario, "serving")
    spec, pools = engine_pools(document, single_settings(changes), scenario)
    sources = _modules(spec.model_names, modules, model)
    layout, chunks = _pools_layout(spec, pools)
    deployment = PoolsDeployment(model, layout, sources, chunks)
    if deployment.config.labels:
        raise BadInput("expected a model that generates tokens, which one that classifies does not", file=model.path)
    shape, device = deployment.config.shape, model.device
    for place_of, config in ((each, each.config) for each in layout.engines):
        row = 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPES[model.dtype].itemsize
        size, field = config.num_gpu_blocks * config.block_size * row, "engine.num_gpu_blocks or engine.kv_memory"
        check_memory(size, f"KV caches of a {place_of.role} engine", device, field=field, value=config.num_gpu_blocks)
    options = _worker_options(model, flags, scenario, changes, place)
    for entry in modules:
        options += ["--module", entry]
    return serve_topology(deployment, place, options, serve)


def has_pools(scenario: Path, changes: list[str]) -> bool:
    """Whether a serving scenario has more than one pool, and so engines of several kinds.

    Raises:
        BadInput: the scenario cannot be used.
    """
    spec = check_serving(read_scenario(scenario, "serving"), single_settings(changes), scenario)
    return len(spec.pools) > 1


def serve_topology(
    deployment: Deployment, place: Place, options: list[str], serve: Callable[[TopologyBackend], int]
) -> int:
    """Serve with a topology, or be one of its workers; returns the exit code.

    Args:
        options: of a worker's command line, besides its place. serve: serves a backend over HTTP until a shutdown.
    """
    rank = 0 if place.role is None else place.global_rank(deployment.names)
    address = Address("127.0.0.1", 0) if place.rendezvous is None else Address.parse(place.rendezvous)
    try:
        if rank:
            if place.rendezvous is None:
                raise BadInput("expected it beside --role, where the coordinator is", field="--rendezvous")
            run_worker(deployment, rank, address, place.limits)
            return 0
        return _serve_front(deployment, place, address, options, serve)
    except TransportError as error:
        print(f"serve-live: {error}", file=sys.stderr, flush=True)
        return 1


def _serve_front(
    deployment: Deployment,
    place: Place,
    address: Address,
    options: list[str],
    serve: Callable[[TopologyBackend], int],
) -> int:
    """Start the workers of this machine, wait for all, and serve."""
    names, limits = deployment.names, place.limits
    with ExitStack() as stack:
        listener = stack.enter_context(listen_at(address))
        members = Membership(address, 0, names, deployment.fingerprint, listener=listener, join_seconds=limits.join)
        workers = None
        if place.role is None:
            own = [sys.executable, "-m", "live.server", *options, "--rendezvous", str(members.meeting_point)]
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


def _layout(spec: AfdScenario, model: ModelSource, flags: EngineFlags, file: Path) -> BundleLayout:
    """The sizes of the bundle that a scenario describes.

    Raises:
        BadInput: several ratios, flags that a bundle does not have, or more memory than there is.
    """
    ratios = parse_ratios(spec.ratio)
    if len(ratios) != 1:
        expected = "expected one ratio to serve with, such as --set ratio=2"
        raise BadInput(expected, field="ratio", value=spec.ratio, file=file)
    for name in ("max_num_seqs", "kv_gib", "one_shot"):
        if (value := getattr(flags, name)) is not None:
            expected = "expected none beside a scenario of a bundle, which says it or has no such thing"
            raise BadInput(expected, field=f"--{name.replace('_', '-')}", value=value)
    config, batch_size = model.config(), spec.batch_size
    if config.labels:
        raise BadInput(
            "expected a model that generates tokens, found one that classifies", field="--model", file=model.path
        )
    longest = -(-config.max_position_embeddings // BLOCK)
    blocks = batch_size * longest if flags.kv_blocks is None else flags.kv_blocks
    tokens = flags.max_num_batched_tokens
    tokens = max(PROMPT_TOKENS, batch_size) if tokens is None else tokens
    shape = config.shape
    row = 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPES[model.dtype].itemsize
    topology = ratios[0]
    here = blocks * BLOCK * row * spec.microbatches * topology.attention_instances
    field = "batch_size" if flags.kv_blocks is None else "--kv-blocks"
    check_memory(here, "KV caches of all attention instances", model.device, field=field, value=blocks)
    try:
        engine = EngineConfig(
            num_gpu_blocks=blocks, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=batch_size,
            max_num_batched_tokens=tokens,
        )  # fmt: skip
    except ValueError as error:
        raise BadInput(str(error), field="engine") from None
    return BundleLayout(topology.attention_instances, topology.ffn_instances, spec.microbatches, engine)


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


def _worker_options(
    model: ModelSource, flags: EngineFlags, scenario: Path, changes: list[str], place: Place
) -> list[str]:
    """The command line of a worker, besides its place: the same model and settings."""
    options = [
        "--model", str(model.path.resolve()), "--dtype", model.dtype, "--device", model.device,
        "--threads", str(model.threads), "--scenario", str(scenario.resolve()),
        "--join-seconds", str(place.join_seconds), "--worker-seconds", str(place.worker_seconds),
    ]  # fmt: skip
    if model.random:
        options.append("--random-weights")
    if flags.max_num_batched_tokens is not None:
        options += ["--max-num-batched-tokens", str(flags.max_num_batched_tokens)]
    if flags.kv_blocks is not None:
        options += ["--kv-blocks", str(flags.kv_blocks)]
    for change in changes:
        options += ["--set", change]
    return options
