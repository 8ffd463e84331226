"""Sampling in at most three launches, each as wide as the vocabulary allows.

1. `maxima_kernel`, a program a block of the vocabulary: its maximum, where that is, and its sum of exponentials.
2. `weights_kernel`, a program a block: the sum of its whole weights; and of rows that exclude tokens, a list of those
   that could be kept, bounded from the maxima of the blocks. Greedy batches go without.
3. `choose_kernel`, a program a row: the token. Without exclusions it reads one block again. With them it searches
   for the threshold of top_k, for that of top_p and for the token, a few bits in each pass over the list, which is in
   the caches; or over the whole row, where a flat distribution left more candidates than the list holds.

The list's order varies, since programs append to it as they come. The kernels take only counts and sums of whole
numbers from it, which do not depend on the order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling.parameters import SamplingMetadata
from kernels.shipping import Shipped

BLOCK = 2048
"""Entries of the vocabulary for one program: 16 values a thread at 4 warps, two 128-bit loads of 16-bit logits."""

CANDIDATES = 4096
"""Candidates that a list holds."""

SEARCH_BITS = 4
"""Bits of a threshold that one pass over the candidates finds, by as many sums as they have values: 1, 2 or 4."""


@triton.jit
def _order_key(x):
    """An int32 key with the order of float32, where −0 equals 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(scaled, top):
    """See `reference.whole_weights`."""
    return (tl.exp(scaled - top) * 34359738368.0).to(tl.int64)


@triton.jit
def _scaled(logits, temperature):
    """x / temperature, rounded as IEEE 754 requires, like on the CPU."""
    return tl.div_rn(logits.to(tl.float32), temperature)


@triton.jit
def maxima_kernel(logits_ptr, max_ptr, where_ptr, sum_ptr, count_ptr, vocabulary, blocks, BLOCK: tl.constexpr):
    """The maximum of one block, the first token that has it, and Σ exp(x − maximum)."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    x = tl.load(logits_ptr + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    first = tl.min(tl.where(inside & (x == top), token, vocabulary), axis=0)
    total = tl.sum(tl.exp(tl.where(top == float("-inf"), float("-inf"), x - top)), axis=0)
    place = row * blocks + block
    tl.store(max_ptr + place, top)
    tl.store(where_ptr + place, tl.minimum(first, vocabulary - 1))
    tl.store(sum_ptr + place, total)
    if block == 0:
        tl.store(count_ptr + row, 0)


@triton.jit
def weights_kernel(
    logits_ptr, max_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, mass_ptr, count_ptr, list_token_ptr,
    list_value_ptr,
    vocabulary, blocks,
    FILTERED: tl.constexpr, CANDIDATES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the weights of one block, and its candidates."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        index = tl.arange(0, BLOCKS)
        maxima = tl.load(max_ptr + row * blocks + index, mask=index < blocks, other=float("-inf"))
        maxima = _scaled(maxima, temperature)
        top = tl.max(maxima, axis=0)
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocabulary
        x = tl.load(logits_ptr + row * vocabulary + token, mask=inside, other=float("-inf"))
        scaled = _scaled(x, temperature)
        tl.store(mass_ptr + row * blocks + block, tl.sum(_weight(scaled, top), axis=0))
        if FILTERED:
            k = tl.load(top_k_ptr + row)
            p = tl.load(top_p_ptr + row)
            min_p = tl.load(min_p_ptr + row)
            if (k > 0) | (p < 1) | (min_p > 0):
                bound = _bound(maxima, top, k, p, min_p, vocabulary, BLOCKS)
                mask = inside & (scaled >= bound)
                count = tl.sum(mask.to(tl.int32), axis=0)
                if count > 0:
                    start = tl.atomic_add(count_ptr + row, count)
                    place = start + tl.cumsum(mask.to(tl.int32), axis=0) - 1
                    mask = mask & (place < CANDIDATES)
                    tl.store(list_token_ptr + row * CANDIDATES + place, token, mask=mask)
                    tl.store(list_value_ptr + row * CANDIDATES + place, scaled, mask=mask)


@triton.jit
def _bound(maxima, top, k, p, min_p, vocabulary, BLOCKS: tl.constexpr):
    """A bound below which no x is kept.

    For top_k: at least k tokens are as large as the k-th largest of the blocks' maxima. For top_p: all tokens that lie
    c below the largest have at most a share vocabulary · exp(−c) of the weight, which is less than 1 − p for
    c = ln(vocabulary / (1 − p)). A hundredth is left for rounding.
    """
    bound = tl.where(min_p > 0, top + tl.log(tl.maximum(min_p, 1e-30)) - 0.01, float("-inf"))
    far = tl.log(vocabulary + 0.0) - tl.log(tl.maximum(1 - p, 1e-30)) + 0.01
    bound = tl.maximum(bound, tl.where(p < 1, top - far, float("-inf")))
    if k > 0:
        larger = (maxima[:, None] > maxima[None, :]).to(tl.int32)
        rank = tl.sum(larger, axis=0)
        kth = tl.min(tl.where(rank < k, maxima, float("inf")), axis=0)
        bound = tl.maximum(bound, tl.where(k <= BLOCKS, kth, float("-inf")))
    return bound


@triton.jit
def _kept(row, threshold, below, MASS: tl.constexpr, TRIALS: tl.constexpr, TILE: tl.constexpr):
    """The number of tokens with a key of at least `threshold` and an id under `below`; if MASS, their weights' sum.

    One of them is (TRIALS, 1), and so many results are returned. `row`: as `_filtered` has it.
    """
    logits_ptr, list_token_ptr, list_value_ptr, n, listed, temperature, top = row
    total = tl.zeros((TRIALS, TILE), tl.int64 if MASS else tl.int32)
    for start in range(0, n, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < n
        if listed:
            token = tl.load(list_token_ptr + place, mask=inside, other=0)
            x = tl.load(list_value_ptr + place, mask=inside, other=float("-inf"))
        else:
            token = place
            x = _scaled(tl.load(logits_ptr + place, mask=inside, other=float("-inf")), temperature)
        mask = (inside & (_order_key(x) >= threshold)) & (token < below)
        total += tl.where(mask, _weight(x, top), 0) if MASS else mask.to(tl.int32)
    return tl.sum(total, axis=1)


@triton.jit
def _digit(holds, TRIALS: tl.constexpr):
    """The largest trial that holds, of 0 … TRIALS − 1; trial 0 always does, and no trial behind one that does not."""
    return tl.sum((holds & (tl.arange(0, TRIALS) > 0)).to(tl.int32), axis=0)


@triton.jit
def _filtered(
    row, k, p, min_p, whole, uniform, vocabulary,
    TOKEN_BITS: tl.constexpr, BITS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The token drawn from those that min_p, top_k and top_p keep; `whole` is the weight of all the vocabulary.

    Each pass over the candidates finds BITS bits of a threshold, or of the token: it tries all their values at once.
    `row`: logits, the list's tokens and values, the number of candidates and whether they are listed, temperature and
    the largest x.
    """
    TRIALS: tl.constexpr = 1 << BITS
    TILE: tl.constexpr = CANDIDATES * 2 // TRIALS
    trial = tl.arange(0, TRIALS)[:, None]
    one = tl.arange(0, 1)[:, None]
    threshold = tl.where(min_p > 0, _order_key(row[6] + tl.log(tl.maximum(min_p, 1e-30))), -2147483648)
    if k > 0:
        kth = -2147483648
        for i in range(32 // BITS):
            step = 1 << (32 - BITS - BITS * i)
            counts = _kept(row, kth + trial * step, vocabulary, False, TRIALS, TILE)
            kth += _digit(counts >= k, TRIALS) * step
        threshold = tl.maximum(threshold, kth)
    if p < 1:
        mass_left = _kept(row, threshold + one, vocabulary, True, 1, CANDIDATES)
        total = tl.where((k > 0) | (min_p > 0), tl.sum(mass_left, axis=0), whole)
        mass_needed = tl.maximum(tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        share = -2147483648
        for i in range(32 // BITS):
            step = 1 << (32 - BITS - BITS * i)
            masses = _kept(row, share + trial * step, vocabulary, True, TRIALS, TILE)
            share += _digit(masses >= mass_needed, TRIALS) * step
        threshold = tl.maximum(threshold, share)
    kept_mass = _kept(row, threshold + one, vocabulary, True, 1, CANDIDATES)
    target = (uniform * tl.sum(kept_mass, axis=0).to(tl.float64)).to(tl.int64)
    PASSES: tl.constexpr = (TOKEN_BITS + BITS - 1) // BITS
    token = 0
    for i in range(PASSES):
        step = 1 << (BITS * (PASSES - 1 - i))
        masses = _kept(row, threshold, token + trial * step, True, TRIALS, TILE)
        token += _digit(masses <= target, TRIALS) * step
    return token


@triton.jit
def _unfiltered(logits_ptr, masses, index, temperature, top, uniform, vocabulary, BLOCK: tl.constexpr):
    """The token drawn from all: the block by the sums of the blocks, then the token in it."""
    target = (uniform * tl.sum(masses, axis=0).to(tl.float64)).to(tl.int64)
    block = tl.sum((tl.cumsum(masses, axis=0) <= target).to(tl.int32), axis=0)
    before = tl.sum(tl.where(index < block, masses, 0), axis=0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + token, mask=token < vocabulary, other=float("-inf"))
    weights = _weight(_scaled(x, temperature), top)
    within = tl.sum((before + tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
    return block * BLOCK + within


@triton.jit
def choose_kernel(
    logits_ptr, max_ptr, where_ptr, sum_ptr, mass_ptr, count_ptr, list_token_ptr, list_value_ptr, temperature_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, token_ptr, logprob_ptr,
    vocabulary, blocks,
    GREEDY: tl.constexpr, FILTERED: tl.constexpr, CANDIDATES: tl.constexpr, TOKEN_BITS: tl.constexpr,
    BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of one row and its log-probability."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    index = tl.arange(0, BLOCKS)
    maxima = tl.load(max_ptr + row * blocks + index, mask=index < blocks, other=float("-inf"))
    sums = tl.load(sum_ptr + row * blocks + index, mask=index < blocks, other=0.0)
    top = tl.max(maxima, axis=0)
    sums = sums * tl.exp(tl.where(maxima == float("-inf"), float("-inf"), maxima - top))
    best = tl.min(tl.where((maxima == top) & (index < blocks), index, blocks - 1), axis=0)
    token = tl.load(where_ptr + row * blocks + best)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            scaled_top = _scaled(top, temperature)
            position = tl.load(position_ptr + row).to(tl.int32)
            word, _, _, _ = tl.philox(tl.load(seed_ptr + row), position, 0, 0, 0)
            uniform = word.to(tl.float64) / 4294967296.0
            masses = tl.load(mass_ptr + row * blocks + index, mask=index < blocks, other=0)
            excludes = False
            if FILTERED:
                k = tl.load(top_k_ptr + row)
                p = tl.load(top_p_ptr + row)
                min_p = tl.load(min_p_ptr + row)
                excludes = (k > 0) | (p < 1) | (min_p > 0)
                if excludes:
                    count = tl.load(count_ptr + row)
                    listed = count <= CANDIDATES
                    list_at = row * CANDIDATES
                    token = _filtered(
                        (logits_ptr, list_token_ptr + list_at, list_value_ptr + list_at,
                         tl.where(listed, count, vocabulary), listed, temperature, scaled_top),
                        k, p, min_p, tl.sum(masses, axis=0), uniform, vocabulary, TOKEN_BITS, BITS, CANDIDATES,
                    )  # fmt: skip
            if not excludes:
                token = _unfiltered(logits_ptr, masses, index, temperature, scaled_top, uniform, vocabulary, BLOCK)
            token = tl.minimum(token, vocabulary - 1)
    tl.store(token_ptr + row, token.to(tl.int64))
    logit = tl.load(logits_ptr + token).to(tl.float32)
    tl.store(logprob_ptr + row, logit - top - tl.log(tl.sum(sums, axis=0)))


def sample(logits: torch.Tensor, parameters: SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.sample`; `logits` contiguous."""
    assert logits.is_contiguous(), "rows must follow one another"
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    padded = triton.next_power_of_2(blocks)
    p, filtered = parameters, parameters.filtered and not parameters.greedy

    def fresh(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=logits.device)

    maxima, sums = fresh(blocks, torch.float32), fresh(blocks, torch.float32)
    where, masses = fresh(blocks, torch.int32), fresh(blocks, torch.int64)
    counts, listed = fresh(1, torch.int32), CANDIDATES if filtered else 1
    list_tokens, list_values = fresh(listed, torch.int32), fresh(listed, torch.float32)
    tokens, logprobs = fresh(1, torch.int64)[:, 0], fresh(1, torch.float32)[:, 0]
    grid = (blocks, rows)
    maxima_kernel[grid](logits, maxima, where, sums, counts, vocabulary, blocks, BLOCK=BLOCK, num_warps=4)
    if not p.greedy:
        weights_kernel[grid](
            *(logits, maxima, p.temperature, p.top_k, p.top_p, p.min_p, masses, counts, list_tokens, list_values),
            *(vocabulary, blocks),
            **_weights_constants(filtered, padded),
            num_warps=4,
        )
    choose_kernel[(rows,)](
        *(logits, maxima, where, sums, masses, counts, list_tokens, list_values),
        *(p.temperature, p.top_k, p.top_p, p.min_p, p.seeds, p.positions, tokens, logprobs, vocabulary, blocks),
        **_choose_constants(p.greedy, filtered, padded, vocabulary),
        num_warps=CHOOSE_WARPS,
    )
    return tokens, logprobs


CHOOSE_WARPS = 8
"""A tile of the list is 16 values a thread; more warps would wait longer for each other at every sum."""


def _weights_constants(filtered: bool, padded: int) -> dict[str, int | bool]:
    return {"FILTERED": filtered, "CANDIDATES": CANDIDATES, "BLOCKS": padded, "BLOCK": BLOCK}


def _choose_constants(greedy: bool, filtered: bool, padded: int, vocabulary: int) -> dict[str, int | bool]:
    bits = vocabulary.bit_length()
    return {"GREEDY": greedy, **_weights_constants(filtered, padded), "TOKEN_BITS": bits, "BITS": SEARCH_BITS}


_LOGITS = ("bf16", "fp32")
_MODES = ((True, False), (False, False), (False, True))
_VOCABULARY = 151936

SHIPPED = [
    *(
        Shipped(maxima_kernel, f"*{kind} *fp32 *i32 *fp32 *i32 i32 i32", {"BLOCK": BLOCK}, aligned=("vocabulary",))
        for kind in _LOGITS
    ),
    *(
        Shipped(
            weights_kernel,
            f"*{kind} *fp32 *fp32 *i32 *fp32 *fp32 *i64 *i32 *i32 *fp32 i32 i32",
            _weights_constants(filtered, 128),
            aligned=("vocabulary",),
        )
        for kind in _LOGITS
        for filtered in (False, True)
    ),
    *(
        Shipped(
            choose_kernel,
            f"*{kind} *fp32 *i32 *fp32 *i64 *i32 *i32 *fp32 *fp32 *i32 *fp32 *fp32 *i64 *i64 *i64 *fp32 i32 i32",
            _choose_constants(greedy, filtered, 128, _VOCABULARY),
            num_warps=CHOOSE_WARPS,
            aligned=("vocabulary",),
        )
        for kind in _LOGITS
        for greedy, filtered in _MODES
    ),
]
