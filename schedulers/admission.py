"""Who joins a step: the greedy, class-aware admission loop (Prelude 3, "Scheduler policy")."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Final

from schedulers.batches import Chunk
from schedulers.sequence import PREFILLING, Sequence

if TYPE_CHECKING:
    from schedulers.engine_config import OneShotBudget
    from schedulers.engine_core import EngineCore
    from schedulers.kv_cache import Node
    from schedulers.waiting import WaitingQueue

NO_TOKENS: Final = 0
"""The head of a lane could run, but this step is full."""

NO_ROOM: Final = -1
"""The head of a lane finds no seat or too few blocks, and will not until somebody leaves."""

LATER: Final = -2
"""The head of a lane waits a step, for a prefix that is being computed or for others of its kind."""


def cold_key(sequence: Sequence, cached: int) -> int:
    """The id of the first prefix block beyond `cached` of them: what a leader computes and its peers wait for."""
    ids = sequence.request.prefix_blocks
    return ids[cached] if cached < len(ids) else -1 - sequence.number


def admit(core: EngineCore, chunks: list[Chunk], budget: int) -> bool:
    """Admit waiting sequences to a step, as far as tokens, seats and blocks go; their chunks are appended.

    Lanes are served in the common order of their policy, each until its own head finds no place: that one class is full
    does not hold up the other. But where a one-shot prompt waits for the next step to hold it whole, chats behind it
    begin only if they leave nothing of their prompts for that step. Returns whether everybody who still waits is
    waiting for a seat or for blocks.
    """
    open_lanes = [lane for lane in core.lanes if lane.count]
    lacking = True
    later: list[Sequence] = []
    one_shot = OneShotAllowance(core.config.one_shot, chunks, budget) if core.config.one_shot else None
    while open_lanes:
        lane = _next(open_lanes) if len(open_lanes) > 1 else open_lanes[0]
        sequence = lane.first()
        if sequence is None:
            open_lanes.remove(lane)
            continue
        if one_shot is not None and sequence.one_shot:
            taken = _place_one_shot(core, chunks, budget, sequence, one_shot)
        else:
            taken = _place(core, chunks, budget, sequence, one_shot is not None and one_shot.awaited)
        if taken > 0:
            budget -= taken
        elif taken == LATER:
            later.append(lane.pop())
            lacking = False
        else:
            open_lanes.remove(lane)
            lacking = lacking and taken == NO_ROOM
    for sequence in later:
        core.lanes[-1 if sequence.one_shot else 0].push(sequence)
    return lacking


def _next(lanes: list[WaitingQueue]) -> WaitingQueue:
    """The lane whose head comes first, or one that has nobody left."""
    for lane in lanes:
        if lane.first() is None:
            return lane
    return min(lanes, key=lambda lane: lane.key())


def _place(core: EngineCore, chunks: list[Chunk], budget: int, sequence: Sequence, whole_only: bool) -> int:
    """Admit the head of the ordinary lane: tokens of its first chunk, or why there are none.

    `whole_only`: that chunk must be all that is missing of its prompt.
    """
    config, kv = core.config, core.kv
    if len(core.running) >= config.max_num_seqs:
        return NO_ROOM
    if budget <= 0:
        return NO_TOKENS
    nodes, spared, left = _cached(core, sequence)
    if core.leading and _is_led(core, sequence, nodes):
        return LATER
    tokens = min(sequence.goal - spared, budget)
    if whole_only and spared + tokens < sequence.goal:
        return NO_TOKENS
    whole = config.reserve == "answer"
    ahead = spared + tokens
    if config.reserve != "chunk":
        ahead = sequence.goal if not whole else sequence.request.prompt_tokens + sequence.limit - 1
    more = max(kv.blocks_for(ahead) - len(nodes) * kv.node_blocks - left, 0)
    if (kv.cost(nodes, more + left) if nodes else more + left) > kv.free:
        return _lacking_blocks(core, nodes)
    if config.max_table_blocks and _table_is_full(core, kv.blocks_for(ahead)):
        return NO_ROOM
    core.lanes[0].pop()
    if spared or sequence.holding.remains is not None:
        kv.attach(sequence.holding, nodes)
        kv.reclaim(sequence.holding, left)
    kv.take(sequence.holding, more)
    sequence.reserved = whole
    _enter(core, sequence, spared)
    core.running[sequence] = None
    return core.schedule(chunks, sequence, tokens)


def _cached(core: EngineCore, sequence: Sequence) -> tuple[list[Node], int, int]:
    """Trie nodes and tokens that the cache spares a sequence, and the blocks among them that are its own remains.

    The last token is always computed, since its output is what is wanted.
    """
    kv = core.kv
    if not sequence.request.prefix_blocks and sequence.holding.remains is None:
        return [], 0, 0
    nodes = kv.match(sequence.request.prefix_blocks, min(sequence.goal - 1, sequence.request.prompt_tokens))
    spared = len(nodes) * kv.node_tokens
    left = kv.remaining(sequence.holding, len(nodes), (sequence.goal - 1 - spared) // kv.block_tokens)
    return nodes, spared + left * kv.block_tokens, left


def _lacking_blocks(core: EngineCore, nodes: Many[Node]) -> int:
    """Too few blocks, and for good until somebody leaves: unless decodes take blocks that the sequence would share.

    An id of several blocks is forgotten whole when one of them is taken. A sequence that finds less then wants fewer
    blocks for its first chunk, by more than have been taken.
    """
    return NO_TOKENS if nodes and core.kv.node_blocks > 1 else NO_ROOM


def _is_led(core: EngineCore, sequence: Sequence, nodes: Many[Node]) -> bool:
    """Whether a prompt in flight computes the block that this one misses first."""
    return bool(core.leading) and cold_key(sequence, len(nodes)) in core.leading


def _table_is_full(core: EngineCore, blocks: int) -> bool:
    entries = 0
    for sequence in core.running:
        cached = core.cohort.kv_tokens(sequence) if sequence in core.cohort.members else sequence.computed
        entries += core.kv.blocks_for(cached)
    return bool(core.running) and entries + blocks > core.config.max_table_blocks


def _enter(core: EngineCore, sequence: Sequence, spared: int) -> None:
    sequence.state = PREFILLING
    sequence.computed = sequence.cached = spared
    core.cached_tokens += spared


class OneShotAllowance:
    """What one-shot work may still take of this step, and the kind of it that the step runs.

    Attributes:
        tokens, sequences: what is left of the class's budget; chunks that go on from the step before have had theirs.
        whole: prompt tokens that a step holds which has these decodes and no other prompts.
        kind: model and task of the one-shot work in this step, None without any.
        awaited: a prompt waits for the next step, which holds it whole.
    """

    __slots__ = ("awaited", "kind", "sequences", "tokens", "whole")

    def __init__(self, budget: OneShotBudget, chunks: Many[Chunk], left: int) -> None:
        """`chunks` are in the step already, and leave `left` tokens of it."""
        self.tokens, self.sequences = budget.most_tokens(), budget.sequences
        self.whole = min(self.tokens, left + sum(chunk.tokens for chunk in chunks))
        self.kind: tuple[str, str] | None = None
        self.awaited = False
        for chunk in chunks:
            if chunk.sequence.one_shot:
                self.spend(chunk.sequence, chunk.tokens)

    def spend(self, sequence: Sequence, tokens: int) -> None:
        """So many tokens of a prompt are in the step."""
        self.tokens -= tokens
        self.sequences -= 1
        self.kind = sequence.request.model, sequence.request.task


def _place_one_shot(
    core: EngineCore, chunks: list[Chunk], budget: int, sequence: Sequence, allowance: OneShotAllowance
) -> int:
    """Admit the head of the one-shot lane: a whole suffix in one pass, or why not.

    Work of another model or task than the step's waits for a later step, since its output head differs. A suffix that
    only what is in this step already keeps from being whole waits for the next. One that no step could take whole is
    chunked over paged blocks like a prompt, and still holds no seat.
    """
    budget = min(budget, allowance.tokens)
    if budget <= 0 or allowance.sequences <= 0:
        return NO_TOKENS
    request = sequence.request
    if allowance.kind not in (None, (request.model, request.task)):
        return LATER
    kv = core.kv
    nodes, spared, left = _cached(core, sequence)
    if _is_led(core, sequence, nodes):
        return LATER
    tokens = sequence.goal - spared
    if tokens <= budget:
        more = _worth_caching(core, sequence, nodes, left)
    elif tokens <= allowance.whole:
        allowance.awaited = True
        return NO_TOKENS
    else:
        tokens = budget
        more = kv.blocks_for(spared + tokens) - len(nodes) * kv.node_blocks - left
    if kv.cost(nodes, more + left) > kv.free:
        return _lacking_blocks(core, nodes)
    core.lanes[-1].pop()
    kv.attach(sequence.holding, nodes)
    kv.reclaim(sequence.holding, left)
    kv.take(sequence.holding, more)
    allowance.spend(sequence, tokens)
    _enter(core, sequence, spared)
    core.visiting[sequence] = None
    return core.schedule(chunks, sequence, tokens)


def _worth_caching(core: EngineCore, sequence: Sequence, nodes: Many[Node], left: int) -> int:
    """Blocks to keep the named part of a one-shot prompt in, for others to find; none where blocks are short.

    `left`: blocks of its own that it will take back, and that serve as well.
    """
    kv = core.kv
    if not kv.caching:
        return 0
    named = min(len(sequence.request.prefix_blocks), sequence.goal // kv.node_tokens)
    more = max((named - len(nodes)) * kv.node_blocks - left, 0)
    return more if kv.cost(nodes, more + left) <= kv.free else 0
