"""Which program of decode attention computes which part of which sequence, found on the device once a step.

The grid of a captured launch is fixed, and lengths are not. If each sequence had as many programs as the longest may
need, most would have no work where lengths differ, and one long sequence would be split as little as short ones. So a
small kernel cuts all sequences into parts of about one size, which follows from their tiles together, and lists them.
Only that list's greatest length depends on shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.shipping import Shipped

LARGE_CHUNK = 512
"""Tokens that keep a program streaming long enough that its start and its partial result are noise (under 1 %)."""
MAX_PARTS = 128
"""Parts of a sequence at most."""
WAVES = 4
"""Parts are longer than `LARGE_CHUNK` if there were more of them than this, for each program that runs at once."""
SEARCHED = 4096
"""Comparisons of a program that looks for the sequences of a few items."""


@dataclass(frozen=True)
class Plan:
    """The sizes of a work list that follow from shapes alone.

    Attributes:
        items: its greatest length; 0: whole sequences are parts, without a list. fill: parts that fill the GPU.
        large: tiles of a large part.
    """

    items: int
    fill: int
    large: int


def select(batch: int, programs: int, longest: int, tile: int, slots: int) -> Plan:
    """The plan of `batch` sequences of up to `longest` tokens, each part of which `programs` programs compute.

    `slots`: programs that the GPU runs at once.
    """
    tiles = max(1, -(-longest // tile))
    fill, large = -(-slots // programs), max(1, LARGE_CHUNK // tile)
    if tiles == 1 or (tiles <= large and batch >= fill):
        return Plan(0, fill, large)
    parts = batch + max(fill, min(batch * tiles // large, WAVES * fill))
    return Plan(min(batch * min(tiles, MAX_PARTS), parts), fill, large)


@dataclass(frozen=True)
class WorkList:
    """Parts of sequences.

    Attributes:
        parts: (items, 3) int32: a sequence, the part's first token and the one behind its last; zeros behind the last
            part. first: (batch + 1,) int32, the first part of each sequence.
    """

    parts: torch.Tensor
    first: torch.Tensor


@triton.jit(do_not_specialize=["batch", "items", "fill"])
def work_list_kernel(
    lengths_ptr, parts_ptr, first_ptr,
    batch, items, fill,
    TILE: tl.constexpr, LARGE: tl.constexpr, MAX: tl.constexpr, WAVES: tl.constexpr, SEQUENCES: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    """ITEMS items of the list; every program adds up all lengths. SEQUENCES > 1 is a power of two, batch or more."""
    sequence = tl.arange(0, SEQUENCES)
    length = tl.load(lengths_ptr + sequence, mask=sequence < batch, other=0)
    tiles = tl.cdiv(length, TILE)
    total = tl.sum(tiles, axis=0)
    chunk = tl.maximum(tl.cdiv(total, fill), 1)
    chunk = tl.where(chunk < LARGE, chunk, tl.maximum(tl.cdiv(total, WAVES * fill), LARGE))
    count = tl.minimum(tl.cdiv(tiles, chunk), MAX)
    size = tl.cdiv(tiles, tl.maximum(count, 1)) * TILE
    count = tl.cdiv(length, tl.maximum(size, 1))  # parts of whole tiles may be fewer
    end = tl.cumsum(count, axis=0)
    if tl.program_id(0) == 0:
        tl.store(first_ptr + sequence, end - count, mask=sequence < batch)
        tl.store(first_ptr + sequence + 1, end, mask=sequence == batch - 1)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    owns = (end - count)[:, None] <= item[None, :]
    owns = owns & (item[None, :] < end[:, None])
    owner = tl.sum(tl.where(owns, sequence[:, None], 0), axis=0)
    within = tl.sum(tl.where(owns, item[None, :] - (end - count)[:, None], 0), axis=0)
    part_size = tl.sum(tl.where(owns, size[:, None], 0), axis=0)
    part_end = tl.minimum((within + 1) * part_size, tl.sum(tl.where(owns, length[:, None], 0), axis=0))
    row = parts_ptr + 3 * item
    tl.store(row, owner, mask=item < items)
    tl.store(row + 1, within * part_size, mask=item < items)
    tl.store(row + 2, part_end, mask=item < items)


def work_list(lengths: torch.Tensor, plan: Plan, tile: int) -> WorkList:
    """The list for lengths (batch,) int32, of parts of whole tiles."""
    batch = len(lengths)
    parts = torch.empty(plan.items, 3, dtype=torch.int32, device=lengths.device)
    first = torch.empty(batch + 1, dtype=torch.int32, device=lengths.device)
    constants = list_constants(batch)
    work_list_kernel[(-(-plan.items // constants["ITEMS"]),)](
        lengths, parts, first, batch, plan.items, plan.fill,
        TILE=tile, LARGE=plan.large, MAX=MAX_PARTS, WAVES=WAVES, **constants, num_warps=4,
    )  # fmt: skip
    return WorkList(parts, first)


def list_constants(batch: int) -> dict[str, int]:
    """Sequences and items of a program of the kernel."""
    sequences = max(16, triton.next_power_of_2(batch))
    return {"SEQUENCES": sequences, "ITEMS": max(1, min(64, SEARCHED // sequences))}


SHIPPED = [
    Shipped(
        work_list_kernel,
        "*i32 *i32 *i32 i32 i32 i32",
        {"TILE": 64, "LARGE": 8, "MAX": MAX_PARTS, "WAVES": WAVES, **list_constants(batch)},
    )
    for batch in (16, 256, 1024)
]
