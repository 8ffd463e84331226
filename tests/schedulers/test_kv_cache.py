"""Blocks of the KV cache: what is forgotten first, what is shared, and what a preempted sequence finds again."""

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


def test_blocks_never_used_go_first_then_the_least_recently_used() -> None:
    kv = KVCache(4, 4)
    first, second = published(kv, 1), published(kv, 2)
    kv.free(first)
    kv.free(second)
    # The queue: two blank blocks, block 1, block 2.
    kv.allocate_unassigned(2)
    assert (cached(kv, 1), cached(kv, 2)) == (1, 1)
    kv.allocate_unassigned(1)
    assert (cached(kv, 1), cached(kv, 2)) == (0, 1)
    kv.allocate_unassigned(1)
    assert (cached(kv, 1), cached(kv, 2), kv.num_free_blocks) == (0, 0, 0)


def test_a_prompt_is_forgotten_from_its_end() -> None:
    kv = KVCache(4, 4)
    kv.free(published(kv, 1, 2, 3))
    remaining = []
    for _ in range(4):
        kv.allocate_unassigned(1)
        remaining.append(cached(kv, 1, 2, 3))
    assert remaining == [3, 2, 1, 0]


def test_private_blocks_go_before_the_shared_ones_that_they_follow() -> None:
    kv = KVCache(3, 4)
    blocks = published(kv, 1, 2)
    kv.allocate(blocks, 1)
    kv.free(blocks)
    kv.allocate_unassigned(1)
    assert cached(kv, 1, 2) == 2


def test_use_makes_a_block_recent() -> None:
    kv = KVCache(2, 4)
    first, second = published(kv, 1), published(kv, 2)
    kv.free(first)
    kv.free(second)
    kv.free(published(kv, 1))  # finds it in the middle of the queue, gives it back at the end
    kv.allocate_unassigned(1)
    assert (cached(kv, 1), cached(kv, 2)) == (1, 0)


def test_a_block_that_is_held_is_never_forgotten() -> None:
    kv = KVCache(3, 4)
    first = published(kv, 1, 2)
    second = published(kv, 1)
    kv.free(first)
    assert kv.num_free_blocks == 2
    kv.allocate_unassigned(2)
    assert cached(kv, 1, 2) == 1
    kv.check_integrity([second], unassigned=2)


def test_only_as_much_is_matched_as_lies_within_the_tokens() -> None:
    kv = KVCache(4, 4)
    published(kv, 1, 2, 3)
    assert [len(kv.match_prefix((1, 2, 3), tokens)) for tokens in (3, 4, 7, 8, 11, 12, 99)] == [0, 1, 1, 2, 2, 3, 3]
    assert len(kv.match_prefix((1, 3, 2), 12)) == 1
    assert len(kv.match_prefix((2,), 4)) == 0


def test_the_same_id_after_another_prefix_is_another_block() -> None:
    kv = KVCache(4, 4)
    published(kv, 1, 5)
    assert cached(kv, 2, 5) == 0
    published(kv, 2, 5)
    assert kv.num_free_blocks == 0
    assert (cached(kv, 1, 5), cached(kv, 2, 5)) == (2, 2)


def test_what_another_sequence_has_cached_becomes_a_copy_that_outlives_it() -> None:
    kv = KVCache(5, 4)
    first, second = SequenceBlocks(), SequenceBlocks()
    kv.allocate(first, 2)
    kv.allocate(second, 3)
    kv.cache_blocks(first, (1, 2), 8)
    kv.cache_blocks(second, (1, 2, 3), 12)
    assert (len(first.nodes), len(second.nodes)) == (2, 3)
    found = kv.match_prefix((1, 2, 3), 12)
    assert found == [*first.nodes, second.nodes[2]]  # the older of equal blocks
    kv.free(first)
    kv.allocate(SequenceBlocks(), 2)  # evicts both blocks of the first
    assert kv.match_prefix((1, 2, 3), 12) == second.nodes
    kv.free(second)
    kv.allocate(SequenceBlocks(), 1)
    assert cached(kv, 1, 2, 3) == 2


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


def test_a_prompt_under_way_publishes_whole_ids_only() -> None:
    kv = KVCache(8, 4, blocks_per_node=2)
    blocks = SequenceBlocks()
    kv.allocate(blocks, 3)
    kv.cache_blocks(blocks, (1, 2), 7)
    assert (len(blocks.nodes), blocks.num_private) == (0, 3)
    kv.cache_blocks(blocks, (1, 2), 12)
    assert (len(blocks.nodes), blocks.num_private) == (1, 1)
    kv.allocate(blocks, 1)
    kv.cache_blocks(blocks, (1, 2), 16)
    assert (len(blocks.nodes), blocks.num_private) == (2, 0)


def test_of_an_id_of_several_blocks_all_are_forgotten_at_once() -> None:
    kv = KVCache(8, 4, blocks_per_node=4)
    kv.free(published(kv, 1, 2))
    kv.allocate_unassigned(1)
    assert (cached(kv, 1, 2), kv.num_free_blocks) == (1, 7)
    kv.allocate_unassigned(3)  # the other three blocks of id 2 come first, before id 1
    assert (cached(kv, 1, 2), kv.num_free_blocks) == (1, 4)
    kv.allocate_unassigned(1)
    assert (cached(kv, 1, 2), kv.num_free_blocks) == (0, 3)


def test_a_draw_may_end_in_the_middle_of_its_second_id() -> None:
    kv = KVCache(5, 4, blocks_per_node=2)
    kv.free(published(kv, 1, 2))
    kv.allocate_unassigned(4)  # the blank block, both of id 2, one of id 1
    assert (cached(kv, 1, 2), kv.num_free_blocks) == (0, 1)
    kv.allocate_unassigned(1)
    kv.check_integrity([], unassigned=5)


def test_a_preempted_sequence_finds_what_nobody_took() -> None:
    kv = KVCache(6, 4)
    blocks = published(kv, 1)
    kv.allocate(blocks, 4)
    kv.free(blocks, 4, preempted=True)
    # The queue: a blank block, its private blocks from the fourth to the first, block 1.
    assert [kv.num_reclaimable(blocks, 1, maximum) for maximum in (1, 4, 9)] == [1, 4, 4]
    kv.allocate_unassigned(3)
    assert kv.num_reclaimable(blocks, 1, 9) == 2
    nodes = kv.match_prefix((1,), 4)
    kv.attach(blocks, nodes)
    kv.reclaim(blocks, 2)
    assert (kv.num_blocks_of(blocks), kv.num_free_blocks) == (3, 0)
    kv.check_integrity([blocks], unassigned=3)


def test_nothing_is_left_once_all_is_taken() -> None:
    kv = KVCache(3, 4)
    blocks = SequenceBlocks()
    kv.allocate(blocks, 2)
    kv.free(blocks, 2, preempted=True)
    kv.allocate_unassigned(3)
    assert kv.num_reclaimable(blocks, 0, 9) == 0
    kv.reclaim(blocks, 0)
    kv.check_integrity([blocks], unassigned=3)


def test_only_full_blocks_are_worth_finding_again() -> None:
    kv = KVCache(4, 4)
    blocks = SequenceBlocks()
    kv.allocate(blocks, 3)
    kv.free(blocks, 2, preempted=True)  # the third is begun, or was only reserved
    assert kv.num_reclaimable(blocks, 0, 9) == 2
    kv.allocate_unassigned(2)  # the blank one and the third
    assert kv.num_reclaimable(blocks, 0, 9) == 2


def test_what_is_not_taken_back_stays_where_it_stood() -> None:
    kv = KVCache(4, 4)
    blocks, second = SequenceBlocks(), published(kv, 1)
    kv.allocate(blocks, 3)
    kv.free(blocks, 3, preempted=True)
    kv.free(second)
    kv.reclaim(blocks, 2)
    assert kv.num_free_blocks == 2
    kv.allocate_unassigned(1)  # the third of its blocks was used before block 1 was
    assert cached(kv, 1) == 1
    kv.check_integrity([blocks], unassigned=1)


def test_blocks_that_others_published_meanwhile_count_from_the_start_of_ones_own() -> None:
    kv = KVCache(6, 4)
    blocks = SequenceBlocks()
    kv.allocate(blocks, 3)
    kv.free(blocks, 3, preempted=True)
    published(kv, 1)
    assert [kv.num_reclaimable(blocks, follows, 9) for follows in (0, 1, 2, 3, 4)] == [3, 2, 1, 0, 0]
    kv.attach(blocks, kv.match_prefix((1,), 4))
    kv.reclaim(blocks, 2)
    assert (kv.num_blocks_of(blocks), kv.num_free_blocks) == (3, 3)


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
