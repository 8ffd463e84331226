"""Blocks of the KV cache on small examples. Recorded decisions of vLLM (`tests/vllm_parity`) say the rest."""

from __future__ import annotations

import pytest

from schedulers.kv_cache import KVCache, PathHashes, SequenceBlocks, cached_path


def published(kv: KVCache, *ids: int) -> SequenceBlocks:
    """A sequence whose whole prompt is these prefix ids."""
    blocks = SequenceBlocks()
    kv.attach(blocks, kv.match_prefix(ids, len(ids) * kv.node_tokens))
    kv.allocate(blocks, len(ids) * kv.blocks_per_node - kv.num_blocks_of(blocks))
    kv.cache_blocks(blocks, ids, len(ids) * kv.node_tokens)
    return blocks


def cached(kv: KVCache, *ids: int) -> int:
    return len(kv.match_prefix(ids, len(ids) * kv.node_tokens))


def test_only_as_much_is_matched_as_lies_within_the_tokens() -> None:
    kv = KVCache(4, 4)
    published(kv, 1, 2, 3)
    assert [len(kv.match_prefix((1, 2, 3), tokens)) for tokens in (3, 4, 7, 8, 11, 12, 99)] == [0, 1, 1, 2, 2, 3, 3]
    assert len(kv.match_prefix((1, 3, 2), 12)) == 1
    assert len(kv.match_prefix((2,), 4)) == 0


def test_blocks_that_no_prompt_can_find_are_allocated_first() -> None:
    for first, remaining in ((True, 1), (False, 0)):
        kv = KVCache(3, 4)
        kv.reuse_unhashed_first = first
        kv.free(published(kv, 1))
        blocks = SequenceBlocks()
        kv.allocate(blocks, 2)
        kv.free(blocks, num_hashed=0)
        kv.allocate(SequenceBlocks(), 2)
        assert cached(kv, 1) == remaining


def test_an_emptied_cache_finds_nothing_and_has_all_blocks() -> None:
    kv = KVCache(4, 4)
    held = published(kv, 1, 2)
    assert not kv.reset_prefix_cache()
    kv.free(held)
    preempted = SequenceBlocks()
    kv.allocate(preempted, 2)
    kv.free(preempted, 2, preempted=True)
    assert kv.reset_prefix_cache()
    assert (cached(kv, 1, 2), kv.num_reclaimable(preempted, 0, 9), kv.num_free_blocks) == (0, 0, 4)
    kv.check_integrity([])


def test_without_caching_nothing_is_found() -> None:
    kv = KVCache(4, 4, enable_caching=False)
    blocks = published(kv, 1, 2)
    assert (cached(kv, 1, 2), blocks.num_private) == (0, 2)
    kv.free(blocks, 2, preempted=True)
    assert (kv.num_reclaimable(blocks, 0, 9), kv.num_free_blocks) == (0, 4)


@pytest.mark.parametrize("sizes", [(0, 16, 1), (4, 0, 1), (4, 16, 0)])
def test_sizes_below_one(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KVCache(*sizes)


def test_more_than_there_is() -> None:
    kv = KVCache(4, 4)
    with pytest.raises(AssertionError, match="5 blocks wanted, 4 are free"):
        kv.allocate_unassigned(5)


def test_integrity_check_speaks_up() -> None:
    kv = KVCache(4, 4)
    blocks = published(kv, 1)
    kv.check_integrity([blocks])
    with pytest.raises(AssertionError, match="0 blocks held and 3 free make 3 of 4"):
        kv.check_integrity([])
    blocks.nodes[0].ref_count = 2
    with pytest.raises(AssertionError, match="2 references, 1 holders"):
        kv.check_integrity([blocks])
    kv.num_free_blocks = 2
    with pytest.raises(AssertionError, match="3 blocks stand in the free queue, 2 are counted free"):
        kv.check_integrity([blocks])


@pytest.mark.parametrize("length", range(6))
def test_the_cached_part_of_a_path_is_found_by_its_hashes(length: int) -> None:
    """Whatever its length, and however much of it is cached."""
    ids = (7, 7, 3, 9, 1)
    hashes = PathHashes().of(ids)
    assert len(set(hashes)) == len(ids)
    for num_cached in range(6):
        nodes = dict.fromkeys([*hashes[:num_cached], 12345])
        assert cached_path(hashes, length, nodes) == min(length, num_cached)


def test_hashes_are_those_of_the_latest_path() -> None:
    paths = PathHashes()
    first = list(paths.of((1, 2)))
    assert paths.of((1, 3))[:1] == first[:1]
    assert paths.of((1, 3))[1] != first[1]
    assert paths.of((1, 2)) == first
