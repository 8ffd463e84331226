"""Sizes that steps are padded to, so that a few CUDA graphs serve all batches.

A step that only decodes is bound by memory reads, and a padded row reads no cache: its sizes may be half an octave
apart. Prompt tokens are bound by arithmetic, which padding wastes: their sizes are a quarter of an octave apart. Beyond
`max_captured_tokens` prompt tokens the GPU takes longer than the host, so a step runs without padding or a graph.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

WIDTHS = (64, 4)
"""The narrowest block table, columns, and the factor from one width to the next."""


@dataclass(frozen=True)
class StepShape:
    """The sizes that the launches of a step depend on.

    Attributes:
        decodes: decode rows. chunks: prompt chunks. tokens: rows of all chunks together. blocks: columns of tables.
        greedy_only: all outputs are greedy tokens, so that sampling is part of the step and only tokens leave it.
        captured: the sizes are padded ones, and the step may become a graph.
    """

    decodes: int
    chunks: int
    tokens: int
    blocks: int
    greedy_only: bool
    captured: bool = True


class CaptureSizes:
    """The sizes of one engine, each list in ascending order.

    Attributes:
        decodes_alone: decode rows of steps without prompts. decodes_beside: the same of steps with prompts.
        chunks, tokens, blocks: as in `StepShape`.
    """

    def __init__(self, decodes: int, chunks: int, tokens: int, blocks: int, max_captured_tokens: int = 2048) -> None:
        self.decodes_alone = sizes(decodes, 2)
        self.decodes_beside = [0, *powers(8, 4, decodes)]
        self.chunks = powers(1, 4, chunks)
        self.tokens = [size for size in sizes(min(tokens, max_captured_tokens), 4) if size >= min(16, tokens)]
        self.blocks = powers(*WIDTHS, blocks)

    def shape(self, decodes: int, chunks: int, tokens: int, blocks: int, greedy_only: bool) -> StepShape:
        """The smallest shape with at least these sizes."""
        if tokens > self.tokens[-1]:
            return StepShape(decodes, chunks, tokens, blocks, greedy_only, captured=False)
        width = at_least(self.blocks, blocks)
        if not chunks:
            return StepShape(at_least(self.decodes_alone, decodes), 0, 0, width, greedy_only)
        parts = at_least(self.decodes_beside, decodes), at_least(self.chunks, chunks), at_least(self.tokens, tokens)
        return StepShape(*parts, width, greedy_only)

    def decode_shapes(self) -> list[StepShape]:
        """The shapes of greedy steps without prompts, the largest first: later graphs share its memory."""
        return [
            StepShape(n, 0, 0, blocks, True) for blocks in reversed(self.blocks) for n in reversed(self.decodes_alone)
        ]


def sizes(maximum: int, parts: int) -> list[int]:
    """1, 2, 4, 8, 16, and from there `parts` sizes in every octave, up to `maximum`."""
    result = [1, 2, 4, 8]
    octave = 16
    while octave < maximum:
        result += [octave + octave * part // parts for part in range(parts)]
        octave *= 2
    return [*(size for size in result if size < maximum), maximum]


def powers(first: int, base: int, maximum: int) -> list[int]:
    """first, first · base, first · base², …, up to `maximum`."""
    result = []
    while first < maximum:
        result.append(first)
        first *= base
    return [*result, maximum]


def padded_width(blocks: int) -> int:
    """Columns of the block tables of a captured step whose longest sequence has so many blocks, in a large cache."""
    width = WIDTHS[0]
    while width < blocks:
        width *= WIDTHS[1]
    return width


def at_least(choices: list[int], size: int) -> int:
    """The smallest of the ascending `choices` that is at least `size`."""
    return choices[bisect_left(choices, size)]
