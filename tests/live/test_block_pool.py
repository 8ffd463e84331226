"""Physical blocks, checked by what is read back from them.

Every token that a step computes is written into its block; every sequence of a step then reads its whole context, and
must find its own tokens there, or those of a request with the same prefix.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from live.block_pool import BlockPool
from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.sequence import FINISHED, Sequence
from workloads.request import Request

BLOCK = 2


@dataclass
class Plant:
    """Writes and reads what a real engine would."""

    core: EngineCore
    memory: dict[tuple[int, int], object] = field(default_factory=dict)
    lengths: dict[Sequence, int] = field(default_factory=dict)

    @property
    def pool(self) -> BlockPool:
        assert isinstance(self.core.kv_cache, BlockPool)
        return self.core.kv_cache

    def content(self, sequence: Sequence, position: int) -> object:
        ids = sequence.request.prefix_blocks[: position // self.pool.node_tokens + 1]
        whole = len(ids) == position // self.pool.node_tokens + 1
        return (ids, position) if whole else (sequence.seq_id, position)

    def run(self, batch: Batch) -> None:
        pool = self.pool
        for sequence in batch.decodes:
            length = self.lengths[sequence] = self.lengths[sequence] + 1
            if len(pool.table(sequence.blocks)) * BLOCK < length:
                pool.assign(sequence.blocks)
            self.write(sequence, length - 1)
        for chunk in batch.chunks:
            self.lengths[chunk.sequence] = chunk.context + chunk.tokens
            for position in range(chunk.context, chunk.context + chunk.tokens):
                self.write(chunk.sequence, position)
        for sequence in (*batch.decodes, *(chunk.sequence for chunk in batch.chunks)):
            for position in range(self.lengths[sequence]):
                assert self.memory[self.place(sequence, position)] == self.content(sequence, position)

    def place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return self.pool.table(sequence.blocks)[position // BLOCK], position % BLOCK

    def write(self, sequence: Sequence, position: int) -> None:
        self.memory[self.place(sequence, position)] = self.content(sequence, position)


@given(
    seed=st.integers(0, 10**9),
    blocks=st.integers(6, 24),
    node_blocks=st.integers(1, 2),
    caching=st.booleans(),
    share=st.sampled_from(["scheduled", "computed"]),
    depth=st.integers(1, 2),
    sglang=st.booleans(),
)
def test_everybody_reads_their_own_context(
    seed: int, blocks: int, node_blocks: int, caching: bool, share: str, depth: int, sglang: bool
) -> None:
    random = Random(seed)
    config = EngineConfig(
        num_gpu_blocks=blocks,
        block_size=BLOCK,
        prefix_id_tokens=BLOCK * node_blocks,
        enable_prefix_caching=caching,
        cache_blocks_on=share,  # type: ignore[arg-type]
        max_num_seqs=(seats := random.randint(1, 6)),
        max_num_batched_tokens=seats + random.randint(1, 10),
        enable_mixed_chunk=not sglang,
        preemption_policy="fewest_outputs" if sglang else None,
        scheduler="sglang" if sglang else "vllm-0.33",  # whose equal blocks are held once
    )
    core = EngineCore(config, make_cache=BlockPool)
    plant, in_flight = Plant(core), deque[Batch]()
    arrivals = sorted(random.randint(0, 40) for _ in range(14))
    for step in range(2000):
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            submit(core, random, 2 * blocks)
        if core.sequences and random.random() < 0.05:
            core.abort(random.choice(list(core.sequences)), step)
            core.check_integrity()
        batch = core.begin_step(step)
        if batch is not None:
            plant.run(batch)
            in_flight.append(batch)
            core.check_integrity()
        if len(in_flight) == depth or (in_flight and batch is None):
            ended = in_flight.popleft()
            running = [s for s in ended.decodes if s.state != FINISHED]
            core.end_step(ended, [s for s in running if random.random() < 0.05], step)
            core.check_integrity()
        if not (arrivals or core.sequences or in_flight):
            break
    else:
        pytest.fail("requests remain")
    assert core.kv_cache.num_free_blocks == blocks
    assert not plant.pool.unassigned_ids


def submit(core: EngineCore, random: Random, max_output: int) -> None:
    """A request that fits, with a prefix that others may have."""
    prompt = random.randint(1, max_output // 2)
    limit = random.randint(1, max_output - prompt)
    family = random.randint(0, 2)
    named = prompt // core.kv_cache.node_tokens
    ids = tuple(100 * family + i for i in range(random.randint(0, named)))
    core.submit(Request(core._num_submitted, 0.0, prompt, limit, prefix_blocks=ids), 0.0)
