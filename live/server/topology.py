"""Serving with several workers: the command that starts them, or one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
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
from live.topologies.processes import LocalWorkers, TimeLimits, run_worker
from live.topologies.transport import TransportError
from scenarios.afd import AfdScenario, check_scenario
from scenarios.kinds import read_scenario
from scenarios.overrides import single_settings
from scenarios.ratios import parse_ratios
from schedulers.engine_config import EngineConfig
from workloads.errors import BadInput

BLOCK = 16
"""Block size of the KV cache, tokens."""

PROMPT_TOKENS = 512
"""Prompt and decode tokens of one attention instance in one step of a microbatch, unless the user says otherwise."""

FRONT = "coordinator"
"""The role of rank 0."""


@dataclass(frozen=True)
class Place:
    """Which process of a topology this is, and where they meet: options of the command line."""

    role: str | None
    rank: int
    rendezvous: str | None
    join_seconds: float
    worker_seconds: float

    def refuse(self) -> None:
        """Refuse a place without a topology.

        Raises:
            BadInput: a role or a rendezvous is given.
        """
        for field, value in (("--role", self.role), ("--rendezvous", self.rendezvous)):
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
