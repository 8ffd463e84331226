"""Weights of 3 or 4 bits, rounded to nearest and packed in the order in which the kernels unpack them.

The inputs of a row are cut in blocks of 64 · S. In a block, word w (of 32) holds in its two halves, lowest bits first,
S codes each: code s of half h belongs to input 64 · s + 2 · w + h. So `(word >> (bits · s)) & 0x000F000F` is a pair of
neighbouring inputs, as an operand of a tensor core has them, and 32 words side by side give 64 inputs in a row: no
code is moved to another thread, and activations are read in their own order.

4 bits: S = 4, blocks of 256 inputs in 32 words. 3 bits: S = 8, blocks of 512 inputs in 32 words with the codes' two low
bits, then 16 words with their high bits: byte b of each half of word v holds those of word 2 · v + b.

Blocks are the slowest axis, then rows: the rows that one program works on lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROWS = 128
"""Rows are padded to a multiple of this, so that no program needs a mask for them."""

GROUP = 128
"""Inputs that share a scale, where there are groups."""

WORDS = 32
SPAN = 64
"""Inputs that 32 words hold at one shift."""

STEPS = {4: 4, 3: 8}
"""Codes in half a word, by bits."""

LOW_BITS = {4: 4, 3: 2}
"""Bits of a code that the first 32 words hold."""

BLOCK_WORDS = {4: 32, 3: 48}


@dataclass(frozen=True)
class PackedWeight:
    """Ŵ[n, k] = scales[k // group, n] · (code[n, k] − zeros[k // group, n]), of shape (outputs, inputs).

    Attributes:
        qweight: (blocks, rows, words) int32; rows ≥ outputs, a multiple of `ROWS`.
        scales: (groups, rows) float16.
        zeros: (groups, rows) uint8, or None: every zero is 2^(bits − 1).
        arrivals: int32 zeros, which kernels count in; every launch leaves zeros. One weight may therefore be in one
            launch at a time; on another stream, use a copy with other counters.
        outputs, inputs: of the matrix. bits: 3 or 4.
        group: inputs that share a scale: 128, or 0 where one scale holds for the whole row.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    arrivals: torch.Tensor
    outputs: int
    inputs: int
    bits: int
    group: int

    @property
    def block(self) -> int:
        """Inputs of a block."""
        return SPAN * STEPS[self.bits]

    @property
    def nbytes(self) -> int:
        """Bytes that a product must read."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.qweight.nbytes + self.scales.nbytes + zeros


def quantise(weight: torch.Tensor, bits: int = 4, group: int = GROUP, symmetric: bool = True) -> PackedWeight:
    """Round a weight to nearest.

    Args:
        weight: (outputs, inputs), of any floating type.
        bits: 3 or 4.
        group: 128, or 0 for one scale a row.
        symmetric: the scale is the largest magnitude over 2^(bits − 1) − 1 and zero is 2^(bits − 1); else codes span
            from the smallest value (or 0, if that is less) to the largest (or 0).
    """
    rows, padded = _padded(weight, bits, group)
    groups = rows.float().view(len(rows), -1, group) if group else rows.float().unsqueeze(1)
    max_code = 2**bits - 1
    if symmetric:
        scale = _storable(groups.abs().amax(-1) / (2 ** (bits - 1) - 1))
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = _storable((high - low) / max_code)
        zero = (-low / scale.float()).round().clamp(0, max_code)
    codes = (groups / scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)).round().clamp(0, max_code)
    # What pads the last block is multiplied by no input; its code is only written to be defined.
    packed = pack(torch.nn.functional.pad(codes.flatten(1), (0, padded - rows.shape[1])).to(torch.int32), bits)
    zeros = None if symmetric else zero.T.to(torch.uint8)
    return _assembled(packed, scale.T, zeros, weight.shape, bits, group)


def from_codes(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, group: int
) -> PackedWeight:
    """Pack a weight that another quantiser has rounded.

    Args:
        codes: (outputs, inputs) integers in [0, 2^bits). scales: (outputs, groups). zeros: as scales, integers, or
            None where each is 2^(bits − 1). group: 128, or 0 where there is one group.
    """
    outputs, inputs = codes.shape
    block = SPAN * STEPS[bits]
    rows, columns = -outputs % ROWS, -inputs % block
    packed = pack(torch.nn.functional.pad(codes.to(torch.int32), (0, columns, 0, rows)), bits)
    pad = (0, 0, 0, rows)
    wide = torch.nn.functional.pad(scales.half(), pad, value=1.0).T
    offsets = None if zeros is None else torch.nn.functional.pad(zeros.to(torch.uint8), pad).T
    return _assembled(packed, wide, offsets, codes.shape, bits, group)


def _padded(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, int]:
    """The weight with its rows and groups filled up with zeros, and the inputs that whole blocks have."""
    if bits not in STEPS or group not in (0, GROUP):
        raise ValueError(f"bits {bits}, group {group}: expected 3 or 4 bits and a group of {GROUP}, or 0 for none")
    outputs, inputs = weight.shape
    columns = -inputs % group if group else 0
    block = SPAN * STEPS[bits]
    return torch.nn.functional.pad(weight, (0, columns, 0, -outputs % ROWS)), -(-inputs // block) * block


def _storable(scale: torch.Tensor) -> torch.Tensor:
    """Scales in float16, at least its smallest normal number: a group of zeros has a scale, too."""
    return scale.clamp(min=torch.finfo(torch.float16).tiny).half()


def _assembled(
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    shape: torch.Size,
    bits: int,
    group: int,
) -> PackedWeight:
    """Scales and zeros filled up to the groups that whole blocks have, and laid out along the rows."""
    if group:
        missing = packed.shape[0] * SPAN * STEPS[bits] // group - scales.shape[0]
        scales = torch.nn.functional.pad(scales, (0, 0, 0, missing), value=1.0)
        zeros = None if zeros is None else torch.nn.functional.pad(zeros, (0, 0, 0, missing))
    arrivals = torch.zeros(packed.shape[1] // 32 + 512, dtype=torch.int32, device=packed.device)
    zero_points = None if zeros is None else zeros.contiguous()
    return PackedWeight(packed, scales.contiguous(), zero_points, arrivals, shape[0], shape[1], bits, group)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack (rows, blocks · inputs of a block) codes into (blocks, rows, words)."""
    steps, low_bits = STEPS[bits], LOW_BITS[bits]
    # (blocks, rows, word, half, step)
    order = codes.reshape(codes.shape[0], -1, steps, WORDS, 2).permute(1, 0, 3, 4, 2).to(torch.int64)
    step = torch.arange(steps, device=codes.device)
    half = 16 * torch.arange(2, device=codes.device).unsqueeze(-1)
    words = ((order & (2**low_bits - 1)) << (half + low_bits * step)).sum((-1, -2))
    if bits == 3:
        high = ((order >> 2) << (half + step)).sum((-1, -2))
        high = high.view(*high.shape[:-1], WORDS // 2, 2)
        words = torch.cat([words, high[..., 0] + (high[..., 1] << 8)], dim=-1)
    return _signed(words)


def _signed(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def unpack(qweight: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`: int32 codes."""
    steps, low_bits = STEPS[bits], LOW_BITS[bits]
    step = torch.arange(steps, device=qweight.device, dtype=torch.int32)
    half = 16 * torch.arange(2, device=qweight.device, dtype=torch.int32).unsqueeze(-1)
    codes = (qweight[..., :WORDS, None, None] >> (half + low_bits * step)) & (2**low_bits - 1)
    if bits == 3:
        high = torch.stack([qweight[..., WORDS:], qweight[..., WORDS:] >> 8], dim=-1).flatten(-2)
        codes = codes | (((high[..., None, None] >> (half + step)) & 1) << 2)
    # (blocks, rows, word, half, step) to (rows, blocks, step, word, half)
    ordered: torch.Tensor = codes.permute(1, 0, 4, 2, 3).flatten(1)
    return ordered


def dequantise(packed: PackedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ŵ, (outputs, inputs), rounded once to dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    codes = unpack(packed.qweight, packed.bits)[: packed.outputs]
    span = packed.group or codes.shape[1]
    codes = codes.view(len(codes), -1, span)
    zero = 2 ** (packed.bits - 1) if packed.zeros is None else _by_row(packed.zeros, packed.outputs).int()
    weight = (codes - zero).to(wide) * _by_row(packed.scales, packed.outputs).to(wide)
    return weight.flatten(1)[:, : packed.inputs].to(dtype)


def part(packed: PackedWeight, rows: torch.Tensor | None = None, columns: range | None = None) -> PackedWeight:
    """Some rows of a weight, or neighbouring columns, packed as a weight of their own with the same codes.

    Args:
        rows: (n,) int64, in any order. columns: from a multiple of the group on; None: all.
    """
    codes = unpack(packed.qweight, packed.bits)[: packed.outputs, : packed.inputs]
    scales = packed.scales.T[: packed.outputs]
    zeros = None if packed.zeros is None else packed.zeros.T[: packed.outputs]
    if rows is not None:
        codes, scales = codes[rows], scales[rows]
        zeros = None if zeros is None else zeros[rows]
    columns = columns or range(packed.inputs)
    codes = codes[:, columns.start : columns.stop]
    if packed.group:
        assert not columns.start % packed.group, "groups are not cut"
        groups = slice(columns.start // packed.group, -(-columns.stop // packed.group))
        scales, zeros = scales[:, groups], None if zeros is None else zeros[:, groups]
    return from_codes(codes, scales, zeros, packed.bits, packed.group)


def _by_row(values: torch.Tensor, outputs: int) -> torch.Tensor:
    """Rearrange (groups, rows) as (outputs, groups, 1)."""
    return values.T[:outputs].unsqueeze(-1)
