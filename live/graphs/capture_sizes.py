"""Sizes that steps are padded to, so that a few CUDA graphs serve all batches.

A step that only decodes is bound by memory reads, and a padded row reads no cache: its sizes may be half an octave
apart. Prompt tokens are bound by arithmetic, which padding wastes: their sizes are a quarter of an octave apart, and an
eighth from `FINE_TOKENS` on.

A step of more than `max_captured_tokens` prompt tokens runs without padding or a graph. Launching its kernels takes the
host some 15 ms (28 layers, measured beside an H200), which a long step hides and a decode step before it does not.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from schedulers.engine_config import EngineConfig

FINE_TOKENS = 2048

SDPA_TOKENS = 512
"""Tokens from which PyTorch's attention computes a prompt without context, where it may: fewer were not measured."""

WIDTHS = (64, 4)
"""The narrowest block table, columns, and the factor from one width to the next."""


@dataclass(frozen=True)
class StepShape:
    """The sizes that the launches of a step depend on.

    Attributes:
        decodes: decode rows. chunks: prompt chunks. tokens: rows of all chunks together. blocks: columns of tables.
        greedy_only: all outputs are greedy tokens, so that sampling is part of the step and only tokens leave it.
        captured: the sizes are padded ones, and the step may become a graph. no_context: as in `Inputs`.
    """

    decodes: int
    chunks: int
    tokens: int
    blocks: int
    greedy_only: bool
    captured: bool = True
    no_context: bool = False

    @property
    def rows(self) -> int:
        """Rows of all decodes and chunks."""
        return self.decodes + self.tokens

    @property
    def cost(self) -> tuple[int, bool, int]:
        """Orders shapes that hold the same batch."""
        return self.rows, not self.no_context, self.blocks

    def holds(self, other: StepShape) -> bool:
        """True if a batch of the other shape fits into this one, and asks no more of its outputs."""
        sizes = ((self.decodes, other.decodes), (self.chunks, other.chunks), (self.tokens, other.tokens),
                 (self.blocks, other.blocks))  # fmt: skip
        alike = self.greedy_only == other.greedy_only and (self.chunks > 0) == (other.chunks > 0)
        alike = alike and self.no_context <= other.no_context
        return alike and all(ours >= theirs for ours, theirs in sizes)


class CaptureSizes:
    """The sizes of one engine, each list in ascending order.

    Attributes:
        decodes_alone: decode rows of steps without prompts. decodes_beside: the same of steps with prompts.
        chunks, tokens, blocks: as in `StepShape`.
    """

    def __init__(self, decodes: int, chunks: int, tokens: int, blocks: int, max_captured_tokens: int = 8192) -> None:
        self.decodes_alone = sizes(decodes, 2)
        self.decodes_beside = [0, *powers(8, 4, decodes)]
        self.chunks = powers(1, 4, chunks)
        most = min(tokens, max_captured_tokens)
        coarse = sizes(min(most, FINE_TOKENS), 4)
        self.tokens = [size for size in coarse if size >= min(16, tokens)]
        self.tokens += [size for size in sizes(most, 8) if size > FINE_TOKENS]
        self.blocks = powers(*WIDTHS, blocks)

    @classmethod
    def of(cls, config: EngineConfig, tables: tuple[int, int], longest: int) -> CaptureSizes:
        """Those of an engine. `tables`: rows and columns of its decodes' block tables. `longest`: blocks of a context.

        Each sequence may be a decode or a chunk. One-shot prompts have scratch blocks on top of those in the cache.
        """
        rows, blocks = tables
        one_shot = config.one_shot.sequences if config.one_shot else 0
        tokens = config.max_num_batched_tokens
        return cls(rows, min(rows + one_shot, tokens), tokens, longest if one_shot else blocks)

    def shape(
        self, decodes: int, chunks: int, tokens: int, blocks: int, greedy_only: bool, *, no_context: bool = False
    ) -> StepShape:
        """The smallest shape with at least these sizes.

        A step that is not padded may have context: cuDNN plans its attention for each length anew, in some 30 ms as
        others report.
        """
        if tokens > self.tokens[-1]:
            return StepShape(decodes, chunks, tokens, blocks, greedy_only, captured=False)
        width = at_least(self.blocks, blocks)
        if not chunks:
            return StepShape(at_least(self.decodes_alone, decodes), 0, 0, width, greedy_only)
        parts = at_least(self.decodes_beside, decodes), at_least(self.chunks, chunks), at_least(self.tokens, tokens)
        return StepShape(*parts, width, greedy_only, no_context=no_context)

    def decode_shapes(self) -> list[StepShape]:
        """The shapes of greedy steps without prompts, the largest first: later graphs share its memory."""
        return [
            StepShape(n, 0, 0, blocks, True) for blocks in reversed(self.blocks) for n in reversed(self.decodes_alone)
        ]

    def prompt_shapes(self, *, sdpa: bool = False) -> list[StepShape]:
        """Shapes of greedy steps with prompts of up to `FINE_TOKENS` tokens, an octave or less apart, that hold all
        others, the largest first; with `sdpa` those of one prompt without context, too."""
        tokens = [
            size for size in self.tokens if 64 <= size <= FINE_TOKENS and size in (1536, 1 << size.bit_length() - 1)
        ]
        decodes, chunks = sorted({*self.decodes_beside[1:2], self.decodes_beside[-1]}), self.chunks[:2][-1]
        return [
            StepShape(n, 1 if no_context else chunks, size, blocks, True, no_context=no_context)
            for size in reversed(tokens or self.tokens[-1:])
            for blocks in reversed(self.blocks)
            for n in reversed(decodes)
            for no_context in ([False, True] if sdpa and size >= SDPA_TOKENS else [False])
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
