"""Sizes that steps are padded to, so that few graphs serve all batches.

A step that only decodes is bound by what it reads, and a padded row reads no cache: sizes may lie half an octave apart.
Prompt tokens are bound by arithmetic, and padding is arithmetic for nothing: a quarter of an octave. Beyond
`most_captured` prompt tokens the GPU has more to do than the host, and a step runs unpadded, launched one kernel after
the other.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class StepShape:
    """What the launches of a step depend on.

    Attributes:
        decodes: rows that decode. chunks: prompt chunks. tokens: rows of theirs, together. blocks: columns of tables.
        closed: every token is the likeliest and nothing else is asked for, so that only tokens leave the step.
        captured: sizes are padded ones, and the step may become a graph.
    """

    decodes: int
    chunks: int
    tokens: int
    blocks: int
    closed: bool
    captured: bool = True


class Buckets:
    """The sizes of one engine.

    Attributes:
        alone: decodes of steps without prompts. beside: of steps with prompts. chunks, tokens, blocks: as in
            `StepShape`. Each from small to large.
    """

    def __init__(self, decodes: int, chunks: int, tokens: int, blocks: int, most_captured: int = 2048) -> None:
        self.alone = sizes(decodes, 2)
        self.beside = [0, *powers(8, 4, decodes)]
        self.chunks = powers(1, 4, chunks)
        self.tokens = [size for size in sizes(min(tokens, most_captured), 4) if size >= min(16, tokens)]
        self.blocks = powers(64, 4, blocks)

    def shape(self, decodes: int, chunks: int, tokens: int, blocks: int, closed: bool) -> StepShape:
        """The shape for a step of at least these sizes."""
        if tokens > self.tokens[-1]:
            return StepShape(decodes, chunks, tokens, blocks, closed, captured=False)
        width = at_least(self.blocks, blocks)
        if not chunks:
            return StepShape(at_least(self.alone, decodes), 0, 0, width, closed)
        parts = at_least(self.beside, decodes), at_least(self.chunks, chunks), at_least(self.tokens, tokens)
        return StepShape(*parts, width, closed)

    def decoding(self) -> list[StepShape]:
        """Of steps that only decode and only greedily; the largest first, whose memory the others then share."""
        return [StepShape(n, 0, 0, blocks, True) for blocks in reversed(self.blocks) for n in reversed(self.alone)]


def sizes(most: int, parts: int) -> list[int]:
    """1, 2, 4, 8, 16, and from there on every octave in so many parts, up to `most`."""
    found = [1, 2, 4, 8]
    octave = 16
    while octave < most:
        found += [octave + octave * part // parts for part in range(parts)]
        octave *= 2
    return [*(size for size in found if size < most), most]


def powers(first: int, base: int, most: int) -> list[int]:
    """first, first · base, …, up to `most`."""
    found = []
    while first < most:
        found.append(first)
        first *= base
    return [*found, most]


def at_least(choices: list[int], wanted: int) -> int:
    """The smallest that is not below `wanted`."""
    return choices[bisect_left(choices, wanted)]
