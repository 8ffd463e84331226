"""Tensor-parallel ranks answer as one rank does, whatever the scheduler does, and a failed rank is named."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread

import pytest
import torch

from kernels.cases import random_layer
from kernels.w4_gemm import PackedWeight, dequantise, part, quantise
from live.backend import EngineBackend
from live.engine import Engine
from live.generation import Generation
from live.loaded_model import ModelSource
from live.models.decoder import Decoder, Inputs
from live.models.linear import Compensated, Rounding
from live.models.tensor_parallel import config_of_rank, layer_of_rank
from live.models.weights import DenseFFN, Layer, random_weights
from live.topologies.membership import Address, Membership, listen_at
from live.topologies.sockets import SocketTransport
from live.topologies.tensor_parallel import Follower, LeadingDecoder, RankGroup, RanksLayout, TensorParallelModel
from live.topologies.transport import STOP, Message, TransportError
from schedulers.step_policies import StaticChunks
from tests.live.topologies.answers import CONFIGS, colocated, outputs, requests, settings
from tests.live.topologies.test_processes import TINY
from workloads.errors import BadInput

MODELS = CONFIGS | {"compensated": CONFIGS["qwen3"]}


def compensated(layer: Layer) -> Layer:
    """A packed layer, of which every matrix has a compensator that matters."""

    def with_compensator(matrix: object) -> Compensated:
        assert isinstance(matrix, PackedWeight)
        torch.manual_seed(matrix.outputs + matrix.inputs)
        return Compensated(matrix, random_layer(matrix.outputs, matrix.inputs, 20, 0, "cpu")[1])

    assert isinstance(layer.ffn, DenseFFN)
    ffn = DenseFFN(with_compensator(layer.ffn.gate_up), with_compensator(layer.ffn.down))
    return dataclasses.replace(layer, qkv=with_compensator(layer.qkv), o=with_compensator(layer.o), ffn=ffn)


def make_decoder(name: str, ranks: RankGroup | None = None, group: int = -1) -> Decoder:
    """A tiny model, or a rank's part of it. `group`: of inputs that share a scale, in a packed one."""
    config, is_packed = MODELS[name], name == "compensated"

    def keep(layer: Layer) -> Layer:
        layer = compensated(layer) if is_packed else layer
        return layer if ranks is None else layer_of_rank(layer, config.shape, ranks)

    part = config if ranks is None else config_of_rank(config, ranks.size)
    weights = random_weights(config, torch.float32, "cpu", 3, Rounding(4, group) if is_packed else None, keep)
    return Decoder(part, weights) if ranks is None or ranks.rank else LeadingDecoder(part, weights, ranks)


@contextmanager
def ranks(name: str, size: int, slower: float = 0.0) -> Iterator[LeadingDecoder]:
    """Ranks in threads of this process, over the connections that processes have; yields rank 0's decoder.

    `slower`: CPU seconds that the others work beside each step.
    """
    torch.set_num_threads(1)
    groups = [RankGroup(rank, size) for rank in range(size)]
    decoders = [make_decoder(name, group) for group in groups]
    names = [f"tensor parallel {rank}" for rank in range(size)]
    listener = listen_at(Address("127.0.0.1", 0))
    address = Address("127.0.0.1", listener.getsockname()[1])

    def connect(rank: int) -> tuple[Membership, SocketTransport]:
        members = Membership(address, rank, names, "", listener=None if rank else listener)
        members.gather()
        transport = SocketTransport(members, RanksLayout(size).forms(MODELS[name], torch.float32), 5.0)
        groups[rank].transport = transport
        return members, transport

    def run(rank: int) -> None:
        members, transport = connect(rank)
        embed = decoders[rank].embed

        def work_and_embed(inputs: Inputs) -> torch.Tensor:
            end = time.thread_time() + slower
            while time.thread_time() < end:
                pass
            return embed(inputs)

        decoders[rank].embed = work_and_embed  # type: ignore[method-assign]
        transport.run(Follower(decoders[rank], groups[rank]).run())
        transport.close()
        members.close()

    threads = [Thread(target=run, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    members, transport = connect(0)
    leader = decoders[0]
    assert isinstance(leader, LeadingDecoder)
    try:
        yield leader
        for rank in range(1, size):
            transport.send(rank, Message(STOP))
    finally:
        transport.close()
        for thread in threads:
            thread.join()
        members.close()
        listener.close()


def answered(decoder: Decoder) -> list[Generation]:
    """Requests that an engine has answered in batches, with chunks and preemptions."""
    small = settings(4, num_gpu_blocks=12, max_num_batched_tokens=12)
    engine, generations = Engine(decoder, small, StaticChunks(9)), requests(10)
    for generation in generations:
        generation.logprobs = 0
        engine.submit(generation)
    while engine.step() is not None:
        engine.core.check_integrity()
    assert engine.core.preemptions
    return generations


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(MODELS))
def test_ranks_answer_as_one_does(name: str, size: int) -> None:
    expected = answered(make_decoder(name))
    with ranks(name, size) as decoder:
        for generation, alone in zip(answered(decoder), expected, strict=True):
            assert generation.output == alone.output
            assert generation.token_logprobs == pytest.approx(alone.token_logprobs, abs=2e-5)


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (3, False)])
def test_parts_of_a_packed_weight_have_its_codes(bits: int, symmetric: bool) -> None:
    weight = quantise(torch.randn(70, 512, generator=torch.Generator().manual_seed(1)), bits, 128, symmetric)
    whole, rows = dequantise(weight), torch.tensor([69, 3, 4, 40])
    assert torch.equal(dequantise(part(weight, rows)), whole[rows])
    assert torch.equal(dequantise(part(weight, columns=range(128, 384))), whole[:, 128:384])


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("llama", 3, "expected a divisor of the model's 4 heads"),
        ("qwen3-moe", 8, "expected a divisor of the model's 4 heads"),
        ("compensated", 2, "expected ranks with whole groups of 128 inputs, of 24"),
    ],
)
def test_what_cannot_be_divided_is_refused(name: str, size: int, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        make_decoder(name, RankGroup(0, size), group=128)


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    """Rank 1 works 4 ms more in each step; the clock of rank 0 counts them, and the latency of the sums."""
    with ranks("llama", 2, slower=0.004) as decoder:
        latency = decoder.measure_latency()
        before = decoder.group.behind
        engine, steps = Engine(decoder, settings()), 0
        for generation in requests(6):
            engine.submit(generation)
        while engine.step() is not None:
            steps += 1
    waited = decoder.group.behind - before - 4 * steps * latency  # two sums a layer
    assert steps > 3
    assert 0.9 * 0.004 < waited / steps < 2 * 0.004


def test_a_killed_rank_is_named_and_the_backend_does_not_hang(tmp_path: Path) -> None:
    """Two processes serve; the answers are those of one, and clients get an error when rank 1 is killed."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    source = ModelSource(tmp_path / "config.json", True, "float32", "cpu", 1)
    with closing(TensorParallelModel(source, 2)) as model:
        backend = EngineBackend(Engine(model.decoder, settings(8)), ranks=model)

        async def serve() -> str:
            failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            finished = asyncio.Event()
            generations = requests(6)
            backend.start(lambda progress: finished.set() if progress.finished else None, failed.set_result)
            for generation in generations:
                backend.submit(generation)
            while not all(generation.finish_reason for generation in generations):
                await finished.wait()
                finished.clear()
            assert outputs(generations) == colocated(source.load(), generations)
            os.kill(model.workers.pids[1], signal.SIGKILL)
            return await asyncio.wait_for(failed, 5)

        assert asyncio.run(serve()) == "rank 1 (tensor parallel 1) has ended"
        with pytest.raises(TransportError, match=r"rank 1 \(tensor parallel 1\) has ended"):
            model.decoder.measure_latency()
