"""Tensor parallelism: the processes that compute one model together, rank by rank a part of each layer.

Rank 0 is the engine's own process. It schedules, samples, and has the embedding and the whole LM head: only the sampled
tokens are needed, and logits that other ranks computed would have to come back. Before each step it sends the others
the step's inputs, and every rank runs the same forward pass on its own KV heads. Partial sums go from every rank to
every other, by the messages that carry activations and KV blocks elsewhere (over NCCL on GPUs): each rank adds them up
in the order of ranks, and so gets the same bits. Decision 0029 says why not gloo.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from statistics import quantiles

import torch
from pydantic import TypeAdapter

from live.loaded_model import Models, ModelSource
from live.models.config import ModelConfig
from live.models.decoder import Decoder, Inputs, PagedCache
from live.models.tensor_parallel import config_of_rank
from live.models.weights import Weights
from live.topologies.deployment import MakeWorker, Ranks
from live.topologies.membership import Address
from live.topologies.processes import TimeLimits, gathered, run_worker, visible_gpus
from live.topologies.sockets import SocketTransport, device_link
from live.topologies.transport import (
    COMMON_FORMS,
    STOP,
    Form,
    Forms,
    Message,
    Payload,
    ReceiveAny,
    Role,
    Transport,
    TransportError,
    received,
)
from schedulers.engine_config import EngineConfig
from workloads.errors import BadInput, TwinError

CACHE, STEP, SUM, GATHER, MEASURE = range(2, 7)
"""Kinds of messages: a new KV cache, the inputs of a step, parts of a sum, of a compensated product, and timed sums."""

MAX_ROWS, MAX_LATENT = 1 << 14, 256
"""The most rows of a step, and the largest rank of a compensator."""

MAX_INTEGERS = 1 << 22
"""The most numbers of a step's inputs."""

MEASURED_SUMS = 200

LIMITS = TimeLimits(join=30.0, answer=60.0)
"""The ranks come after they have read the model. Membership notices earlier that one has ended or is stopped."""


class RankGroup:
    """One rank's place among those that compute a model, as `live.models.linear.Group`.

    `behind`: seconds of waiting for slower ranks and messages, for direct execution: between two sums all ranks compute
    at once, so that the longest CPU time passes. `latency`: of a sum beside that time.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.behind = 0.0
        self.latency = 0.0
        self.transport: SocketTransport
        self._since = 0

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """See `Group.sum`. Sums are taken in float32, or in the parts' type if that is wider."""
        parts = self._exchange(SUM, (part,))
        total = parts[0][0].to(torch.promote_types(part.dtype, torch.float32))
        for (other,) in parts[1:]:
            total = total + other
        return total.to(part.dtype)

    def gather(self, outputs: torch.Tensor, latents: torch.Tensor) -> None:
        """See `Group.gather`."""
        parts = self._exchange(GATHER, (outputs[self.rank], latents[self.rank].flatten()))
        for rank, (output, latent) in enumerate(parts):
            if rank != self.rank:
                outputs[rank] = output
                latents[rank] = latent.view_as(latents[rank])

    def start_segment(self) -> None:
        """Begin to compute at the same time as all ranks."""
        self._since = time.thread_time_ns()

    def measure(self, count: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Sum a row several times, to find `latency`: the lower quartile, as sums wait for other programs, too."""
        row, waits = torch.zeros(1, width, dtype=dtype, device=device), []
        for _ in range(count):
            wall, cpu = time.perf_counter(), time.thread_time()
            self.sum(row)
            waits.append(time.perf_counter() - wall - (time.thread_time() - cpu))
        self.latency = max(quantiles(waits, n=4)[0], 0.0)

    def _exchange(self, kind: int, tensors: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
        computed = longest = time.thread_time_ns() - self._since
        self.start_segment()
        message, parts = Message(kind, (computed,), tensors), []
        for rank in range(self.size):
            if rank != self.rank:
                self.transport.send(rank, message)
        for rank in range(self.size):
            if rank == self.rank:
                parts.append(tensors)
                continue
            answer = self.transport.receive(rank)
            if answer.kind != kind:
                raise TransportError(f"rank {rank} sent a message of kind {answer.kind}: expected {kind}")
            longest = max(longest, answer.fields[0])
            parts.append(answer.tensors)
        self.behind += 1e-9 * (longest - computed) + self.latency
        return parts


def step_message(cache: int, inputs: Inputs) -> Message:
    """The inputs of a step as a message. `cache`: the number of the KV cache."""
    (decodes, width), (chunks, chunk_width) = inputs.decode_tables.shape, inputs.chunk_tables.shape
    parts = [part for part in vars(inputs).values() if isinstance(part, torch.Tensor)]
    numbers = torch.cat([part.reshape(-1).to("cpu", torch.int64) for part in parts])
    return Message(STEP, (cache, len(inputs.tokens), decodes, width, chunks, chunk_width), (numbers,))


def inputs_of(message: Message, device: torch.device) -> Inputs:
    _, rows, decodes, width, chunks, chunk_width = message.fields
    sizes = [rows, rows, rows, decodes * width, decodes, chunks * chunk_width, chunks + 1, chunks]
    tokens, positions, slots, *others = message.tensors[0].to(device, copy=True).split(sizes)
    tables, lengths, chunk_tables, starts, contexts = (part.to(torch.int32) for part in others)
    tables, chunk_tables = tables.view(decodes, width), chunk_tables.view(chunks, chunk_width)
    return Inputs(tokens, positions, slots, tables, lengths, chunk_tables, starts, contexts)


class LeadingDecoder(Decoder):
    """Rank 0's part of a model, which lets the others compute theirs of each step. `group`: rank 0's place."""

    def __init__(self, config: ModelConfig, weights: Weights, group: RankGroup) -> None:
        super().__init__(config, weights)
        self.group = group
        self._caches: list[weakref.ref[PagedCache]] = []

    def forward(self, inputs: Inputs, cache: PagedCache) -> torch.Tensor:
        """See `Decoder.forward`. Raises a `TransportError` that names the rank that has failed."""
        self._send(step_message(self._number(cache), inputs))
        self.group.start_segment()
        return super().forward(inputs, cache)

    def measure_latency(self) -> float:
        """Measure the latency of sums, seconds, which counts as time from now on."""
        self._send(Message(MEASURE, (MEASURED_SUMS,)))
        norm = self.weights.norm
        self.group.measure(MEASURED_SUMS, len(norm), norm.dtype, norm.device)
        return self.group.latency

    def _number(self, cache: PagedCache) -> int:
        """The number of a cache among the ranks; a new one gets that of one that is no longer used."""
        for i, known in enumerate(self._caches):
            if known() is cache:
                return i
        unused = (i for i, known in enumerate(self._caches) if known() is None)
        number = next(unused, len(self._caches))
        self._caches[number : number + 1] = [weakref.ref(cache)]
        self._send(Message(CACHE, (number, *cache.keys.shape[1:3])))
        return number

    def _send(self, message: Message) -> None:
        for rank in range(1, self.group.size):
            self.group.transport.send(rank, message)


@dataclass(frozen=True)
class Follower:
    """Every other rank, which computes its part of the steps of rank 0."""

    decoder: Decoder
    group: RankGroup

    def run(self) -> Role:
        decoder, group = self.decoder, self.group
        caches: dict[int, PagedCache] = {}
        norm = decoder.weights.norm
        while True:
            group.start_segment()
            message = received((yield ReceiveAny((0,), wait=True, patient=True)))
            if message.kind == STOP:
                return
            if message.kind == CACHE:
                number, blocks, block_size = message.fields
                caches.pop(number, None)
                caches[number] = PagedCache.allocate(decoder.config, blocks, block_size, norm.dtype, str(norm.device))
            elif message.kind == MEASURE:
                group.measure(message.fields[0], len(norm), norm.dtype, norm.device)
            else:
                decoder.forward(inputs_of(message, norm.device), caches[message.fields[0]])


@dataclass(frozen=True)
class RanksLayout:
    """Ranks of one model, `size` of them."""

    size: int

    @property
    def names(self) -> list[str]:
        return [f"tensor parallel {rank}" for rank in range(self.size)]

    def forms(self, config: ModelConfig, dtype: torch.dtype) -> Forms:
        """The forms of the messages. Sums come with the nanoseconds that the sender has computed."""
        part = Payload(dtype, MAX_ROWS, (config.shape.hidden,), on_device=True)
        latents = Payload(torch.float32, MAX_ROWS * MAX_LATENT, on_device=True)
        return {
            **COMMON_FORMS,
            CACHE: Form(fields=3),
            STEP: Form(fields=6, payloads=(Payload(torch.int64, MAX_INTEGERS),)),
            SUM: Form(fields=1, payloads=(part,)),
            GATHER: Form(fields=1, payloads=(part, latents)),
            MEASURE: Form(fields=1),
        }


class RankedModel(Ranks):
    """A model that several ranks compute."""

    layout: RanksLayout

    def load(self, rank: int, models: Models) -> MakeWorker:
        """Load a rank's part of the model; the result makes the worker. Raises as `LoadedModel`."""
        group = RankGroup(rank, self.layout.size)
        decoder = Decoder(*self.model.load_part(group))

        def make(transport: Transport) -> Follower:
            assert isinstance(transport, SocketTransport), "ranks wait within a step"
            group.transport = transport
            return Follower(decoder, group)

        return make


@dataclass(frozen=True)
class RankOptions:
    """Arguments of a rank's process."""

    model: ModelSource
    size: int
    rank: int
    address: Address
    limits: TimeLimits


RANK_OPTIONS = TypeAdapter(RankOptions)


class TensorParallelModel:
    """A model whose ranks are started on this machine, as `ModelRanks`: rank 0 is this process.

    Raises `BadInput` for a model that cannot be divided, and a `TransportError` that names a failed rank.
    """

    def __init__(self, model: ModelSource, size: int, limits: TimeLimits = LIMITS) -> None:
        config_of_rank(model.config(), size)
        ranked, self.group = RankedModel(model, RanksLayout(size)), RankGroup(0, size)
        gpus = visible_gpus(range(size)) if model.device != "cpu" else {}
        source = replace(model, path=model.path.resolve())

        def command(rank: int, address: Address) -> list[str]:
            options = RANK_OPTIONS.dump_json(RankOptions(source, size, rank, address, limits)).decode()
            return [sys.executable, "-m", "live.topologies.tensor_parallel", options]

        def commands(address: Address) -> dict[int, list[str]]:
            return {rank: command(rank, address) for rank in range(1, size)}

        with ExitStack() as stack:
            self._members, workers = stack.enter_context(
                gathered(ranked, Address("127.0.0.1", 0), limits, gpus, commands)
            )
            assert workers is not None, "it was told to start them"
            self.workers = workers
            self.decoder = LeadingDecoder(*model.load_part(self.group), self.group)
            self._members.ready()
            link = device_link(self._members, limits.answer, model.device) if model.device != "cpu" else None
            transport = SocketTransport(self._members, ranked.forms(), limits.answer, link)
            stack.callback(transport.close)
            self.group.transport = transport
            self._closing = stack.pop_all()

    def on_failure(self, action: Callable[[str], None]) -> None:
        """Let something be called, from any thread, with the reason when a rank has failed."""

        def tell() -> None:
            try:
                self._members.check()
            except TransportError as error:
                action(str(error))

        self._members.on_failure(tell)

    def refuse(self, config: EngineConfig) -> None:
        """See `ModelRanks.refuse`: no host tier, and no steps beyond the messages."""
        if config.kv_offloading is not None:
            raise BadInput("expected none with tensor_parallel_size", field="engine.kv_offloading")
        if config.max_num_batched_tokens > MAX_ROWS:
            expected = f"expected at most {MAX_ROWS} with tensor_parallel_size"
            raise BadInput(expected, field="engine.max_num_batched_tokens", value=config.max_num_batched_tokens)

    def close(self) -> None:
        """End the other ranks. A second call changes nothing."""
        with suppress(TransportError):
            for rank in range(1, self.group.size):
                self.group.transport.send(rank, Message(STOP))
        self._closing.pop_all().close()


def main(arguments: Sequence[str]) -> int:
    """Be one rank, with the options of a `RankOptions` as JSON; returns the exit code."""
    options = RANK_OPTIONS.validate_json(arguments[0])
    try:
        ranked = RankedModel(options.model, RanksLayout(options.size))
        run_worker(ranked, options.rank, options.address, options.limits)
    except TwinError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
