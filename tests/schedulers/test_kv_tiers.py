"""Tiers below the device: each conserves its blocks, every request ends once, and LRU hits are Mattson's."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.engine_config import EngineConfig, KVOffloading, OneShotBudget, TierConfig
from schedulers.engine_core import EngineCore
from schedulers.eviction import EVICTION_POLICIES, CostAware, TierBlock
from tests.schedulers.plant import Plant, Visit
from workloads.request import Request
from workloads.trace import BlockStream

BLOCK = 2


def engine(
    host: int, disk: int = 0, *, device: int = 12, policy: str = "write_through", **changes: object
) -> EngineCore:
    eviction = str(changes.pop("eviction", "lru"))
    tiers = [TierConfig("host", host, eviction)] + ([TierConfig("disk", disk, eviction)] if disk else [])
    offloading = KVOffloading(tuple(tiers), policy)  # type: ignore[arg-type]
    config = EngineConfig(
        num_gpu_blocks=device,
        block_size=BLOCK,
        prefix_id_tokens=BLOCK,
        kv_offloading=offloading,
        **changes,  # type: ignore[arg-type]
    )
    return EngineCore(config)


def serve(core: EngineCore, request: Request) -> int:
    """Serve one request alone, all copies taking no time; returns the prompt tokens that were not computed."""
    before, tiers = core.cached_tokens, core.kv_tiers
    core.submit(request, 0.0)
    while core.sequences:
        batch = core.begin_step(0.0)
        for store in tiers.take_stores(False):
            store.block.ready_at = 0.0
        for load in tiers.take_loads():
            core.finish_load(load)
        if batch is not None:
            core.end_step(batch, (), 0.0)
        for store in tiers.take_stores(True):
            store.block.ready_at = 0.0
        core.check_integrity()
    return core.cached_tokens - before


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=60)


@given(prompts, st.integers(5, 40), st.integers(6, 9))
def test_the_host_tier_is_an_lru_cache(prompts: list[tuple[int, ...]], host: int, device: int) -> None:
    """One request at a time. The host keeps what the device has and more, so the two supply what the host would."""
    core, stream = engine(max(host, device), device=device), BlockStream()
    supplied = 0
    for number, ids in enumerate(prompts):
        supplied += serve(core, Request(number, 0.0, BLOCK * len(ids) + 1, 1, prefix_blocks=ids))
        stream.add(ids, len(ids))
    assert supplied == BLOCK * stream.lru_hits([max(host, device)])[0]
    assert supplied <= BLOCK * stream.belady_hits(max(host, device))


@given(
    prompts, st.integers(1, 12), st.integers(0, 12), st.integers(6, 12), st.sampled_from(["lru", "cost_aware"]),
    st.sampled_from(["write_through", "write_back"]),
)  # fmt: skip
def test_nothing_supplies_more_than_the_bounds(
    prompts: list[tuple[int, ...]], host: int, disk: int, device: int, eviction: str, policy: str
) -> None:
    core, stream = engine(host, disk, device=device, eviction=eviction, policy=policy), BlockStream()
    supplied = 0
    for number, ids in enumerate(prompts):
        supplied += serve(core, Request(number, 0.0, BLOCK * len(ids) + 1, 1, prefix_blocks=ids))
        stream.add(ids, len(ids))
    assert supplied <= BLOCK * stream.belady_hits(device + host + disk) <= BLOCK * stream.infinite_hits()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_tiers_without_end_are_an_infinite_cache(policy: str) -> None:
    random, core, stream, supplied = Random(1), engine(10_000, policy=policy), BlockStream(), 0
    for number in range(300):
        ids = tuple(random.randrange(3) for _ in range(random.randint(1, 5)))
        supplied += serve(core, Request(number, 0.0, BLOCK * len(ids) + 1, 1, prefix_blocks=ids))
        stream.add(ids, len(ids))
    assert supplied == BLOCK * stream.infinite_hits() > 0


def test_what_the_device_evicts_is_copied_once() -> None:
    """Write-back copies a block when the device loses it, and not again while the tier has it."""
    core = engine(100, device=6, policy="write_back")
    tiers = core.kv_tiers
    (host,) = tiers.tiers
    counts = []
    for number in range(24):
        serve(core, Request(number, 0.0, 9, 1, prefix_blocks=(10 * (number % 2), 1, 2, 3)))
        counts.append((host.stored, host.loaded))
    assert counts[5][0] == counts[-1][0] <= 8
    assert counts[5][1] < counts[-1][1]
    assert host.evicted == 0


def test_a_shared_prefix_is_loaded_once() -> None:
    """The second request waits for the load of the first, and then finds its blocks on the device."""
    core = engine(100, device=20)
    tiers = core.kv_tiers
    for number in range(6):  # the first prompt is evicted
        serve(core, Request(number, 0.0, 9, 1, prefix_blocks=(number, 1, 2, 3)))
    for number in (100, 101):
        core.submit(Request(number, 0.0, 9, 1, prefix_blocks=(0, 1, 2, 3)), 0.0)
    core.submit(Request(102, 0.0, 9, 1, prefix_blocks=(50, 1, 2, 3)), 0.0)
    batch = core.begin_step(0.0)
    (load,) = tiers.take_loads()
    assert [chunk.sequence.request.id for chunk in batch.chunks] == [102], "it does not wait for the load"
    assert core.num_waiting == 2
    core.end_step(batch, (), 0.0)
    core.finish_load(load)
    batch = core.begin_step(0.0)
    assert [(chunk.sequence.request.id, chunk.context) for chunk in batch.chunks] == [(100, 8), (101, 8)]
    assert tiers.tiers[0].loaded == 4


def test_a_block_is_not_loaded_before_its_copy_is_complete() -> None:
    core = engine(100, device=6)
    tiers = core.kv_tiers
    stores = []
    for number in range(3):
        core.submit(Request(number, 0.0, 9, 1, prefix_blocks=(number, 1, 2, 3)), 0.0)
        batch = core.begin_step(0.0)
        assert batch is not None
        core.end_step(batch, (), 0.0)
        stores += tiers.take_stores(True)
    for store in stores:
        store.block.ready_at = 5.0 if store.block.depth < 2 else 7.0
    request = Request(9, 0.0, 9, 1, prefix_blocks=(0, 1, 2, 3))
    results = []
    for now in (4.0, 5.0, 7.0):
        tiers.now = now
        results.append(core.cached_prefix_tokens(request))
    assert results == [0, 4, 8]


def test_an_aborted_request_leaves_its_load_to_end() -> None:
    core = engine(100, device=6)
    tiers = core.kv_tiers
    for number in range(4):
        serve(core, Request(number, 0.0, 9, 1, prefix_blocks=(number, 1, 2, 3)))
    core.submit(Request(9, 0.0, 9, 1, prefix_blocks=(0, 1, 2, 3)), 0.0)
    assert core.begin_step(0.0) is None
    (load,) = tiers.take_loads()
    assert core.kv_cache.num_free_blocks == 2
    core.abort(9, 0.0)
    core.check_integrity()
    assert (core.num_waiting, core.kv_cache.num_free_blocks) == (0, 2)
    core.finish_load(load)
    core.check_integrity()
    assert core.kv_cache.num_free_blocks == 6
    assert core.cached_prefix_tokens(Request(10, 0.0, 9, 1, prefix_blocks=(0, 1, 2, 3))) == 8


@given(
    st.sampled_from(list(EVICTION_POLICIES)),
    st.lists(
        st.tuples(st.sampled_from(["add", "use", "pin", "evict"]), st.integers(0, 9), st.floats(1, 9)), max_size=80
    ),
)
def test_a_policy_gives_up_blocks_that_it_has(policy: str, calls: list[tuple[str, int, float]]) -> None:
    eviction, present = EVICTION_POLICIES[policy](), dict[int, TierBlock]()
    for call, number, loss in calls:
        if call == "evict":
            victim = eviction.victim()
            free = [block for block in present.values() if not block.pins]
            assert (victim is None) == (not free)
            if victim is not None:
                assert victim in free
                eviction.remove(victim)
                del present[victim.block_hash]
        elif number not in present:
            present[number] = TierBlock(number, 0, 0)
            eviction.add(present[number], loss)
        elif call == "pin":
            present[number].pins ^= 1
        else:
            eviction.use(present[number], loss)
        assert eviction.size() == len(present)


def test_what_costs_more_to_compute_stays_longer() -> None:
    policy = CostAware()
    cheap, dear, old = TierBlock(1, 0, 0), TierBlock(2, 0, 1), TierBlock(3, 0, 2)
    policy.add(old, 4.0)
    policy.add(dear, 9.0)
    policy.add(cheap, 1.0)
    order = []
    for number in range(3):
        victim = policy.victim()
        order.append(victim.block_hash)
        policy.remove(victim)
        policy.add(TierBlock(10 + number, 0, 3), 2.0)  # the clock has reached 1, 3: these are worth 3, 5
    assert order == [1, 10, 3]


visits = st.builds(
    Visit, at=st.integers(0, 60), prompt=st.integers(6, 20), limit=st.integers(2, 6),
    ids=st.tuples(st.integers(0, 3), st.integers(0, 1), st.just(0), st.just(0), st.integers(0, 1), st.just(0)),
    abort=st.one_of(st.none(), st.none(), st.integers(0, 6)), in_flight=st.booleans(),
    way=st.sampled_from(["here", "here", "here", "sent", "received"]),
)  # fmt: skip
judges = st.builds(
    Visit, at=st.integers(0, 60), prompt=st.integers(6, 20), limit=st.integers(0, 1),
    ids=st.tuples(st.integers(0, 3), st.integers(0, 1), st.just(0), st.just(0), st.integers(0, 1)),
    abort=st.one_of(st.none(), st.integers(0, 6)),
)  # fmt: skip
tiers = st.builds(TierConfig, st.just("tier"), st.integers(1, 20), st.sampled_from(["lru", "cost_aware"]))


@given(
    st.lists(tiers, min_size=1, max_size=2).map(tuple), st.sampled_from(["write_through", "write_back"]),
    st.integers(10, 20), st.sampled_from(["scheduled", "computed"]), st.booleans(), st.sampled_from([1, 2]),
    st.lists(st.one_of(visits, visits, judges), min_size=5, max_size=40),
)  # fmt: skip
def test_any_story_with_tiers(
    tiers: tuple[TierConfig, ...], policy: str, device: int, share: str, one_shot: bool, depth: int, story: list[Visit]
) -> None:
    """`Plant` checks blocks of the device and of every tier after each step, and that everybody has ended once."""
    config = EngineConfig(
        num_gpu_blocks=device, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_batched_tokens=24, max_num_seqs=4,
        cache_blocks_on=share, kv_offloading=KVOffloading(tiers, policy),  # type: ignore[arg-type]
        one_shot=OneShotBudget(16, 3) if one_shot else None,
    )  # fmt: skip
    for leaps in (False, True)[: 3 - depth]:
        plant = Plant(config, None, depth, leaps=leaps).run(story)
        kv_tiers = plant.core.kv_tiers
        assert not kv_tiers.loads
        assert not kv_tiers.orphans
