"""Linear layers of AWQ and GPTQ checkpoints, unpacked to codes and packed again for the kernels.

A matrix of (outputs, inputs) is stored as three tensors, all with inputs or their groups first. Words are int32, filled
from their lowest bits.

            qweight                         qzeros                            scales
    AWQ     (inputs, outputs · bits / 32)   (groups, outputs · bits / 32)     (groups, outputs)
    GPTQ    (inputs · bits / 32, outputs)   (groups, outputs · bits / 32)     (groups, outputs)

AWQ interleaves the eight codes of a word (`AWQ_ORDER`). GPTQ's 3-bit codes cross word boundaries. GPTQ also has
`g_idx`, (inputs,): the group of each input. With act_order the inputs of a group are spread over the row; they are
sorted here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from kernels.w4_gemm import from_codes
from kernels.w4_gemm.pack import GROUP
from live.models.checkpoint import Checkpoint
from live.models.config import Quantisation
from live.models.linear import Matrix, Reordered, Stacked
from workloads.errors import BadInput

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight neighbouring ones, that each code of a word belongs to, from the lowest bits up."""


@dataclass(frozen=True)
class Codes:
    """Ŵ[n, order[i]] = scales[n, i // group] · (codes[n, i] − zeros[n, i // group]); codes (outputs, inputs) uint8,

    scales (outputs, groups) float16, zeros uint8, order (inputs,) int64 or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor | None


def is_packed(checkpoint: Checkpoint, name: str) -> bool:
    """True if the checkpoint has packed weights of a module (a tensor's name without `.weight`)."""
    return f"{name}.qweight" in checkpoint


def read_joined(
    checkpoint: Checkpoint,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    kind: Quantisation,
    dtype: torch.dtype,
    device: str,
) -> Matrix:
    """Modules with the same inputs, concatenated along their outputs: one product as far as they can be combined.

    Modules in full precision stay dense. Modules with different input orders become separate products. Raises
    `BadInput` for a tensor that is missing, or of another shape or type than the format defines.
    """
    parts = [
        _read(checkpoint, name, shape, kind, device)
        if is_packed(checkpoint, name)
        else checkpoint.tensor(f"{name}.weight", shape).to(device, dtype)
        for name, shape in zip(names, shapes, strict=True)
    ]
    matrices = [_one(list(alike), kind, dtype) for _, alike in groupby(parts, key=_order_of)]
    return matrices[0] if len(matrices) == 1 else Stacked(tuple(matrices))


def _order_of(part: torch.Tensor | Codes) -> list[int] | None:
    """The key by which modules can be combined: their input order; None for dense ones."""
    if isinstance(part, torch.Tensor):
        return None
    return [] if part.order is None else part.order.tolist()


def _one(parts: list[torch.Tensor | Codes], kind: Quantisation, dtype: torch.dtype) -> Matrix:
    packed = [part for part in parts if isinstance(part, Codes)]
    if not packed:
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    joined = Codes(
        codes=torch.cat([part.codes for part in packed]),
        scales=torch.cat([part.scales for part in packed]),
        zeros=torch.cat([part.zeros for part in packed]),
        order=packed[0].order,
    )
    return _matrix(joined, kind, dtype)


def _matrix(codes: Codes, kind: Quantisation, dtype: torch.dtype) -> Matrix:
    """The weight in the kernels' format; dense if they do not support its groups."""
    inputs = codes.codes.shape[1]
    span = _span(kind, inputs)
    scales, zeros = codes.scales, codes.zeros
    if span < inputs and span % GROUP:
        return _dense(codes, span).to(dtype)
    if GROUP < span < inputs:
        scales, zeros = (
            values.repeat_interleave(span // GROUP, 1)[:, : -(-inputs // GROUP)] for values in (scales, zeros)
        )
    middle = bool((zeros == 2 ** (kind.bits - 1)).all())
    group = GROUP if span < inputs else 0
    weight = from_codes(codes.codes, scales, None if middle else zeros, kind.bits, group)
    return weight if codes.order is None else Reordered(weight, codes.order)


def _dense(codes: Codes, span: int) -> torch.Tensor:
    """The weight Ŵ, (outputs, inputs) float32, with its inputs in their original order."""
    inputs = codes.codes.shape[1]
    scales, zeros = (values.repeat_interleave(span, 1)[:, :inputs] for values in (codes.scales, codes.zeros))
    weight = scales.float() * (codes.codes.float() - zeros.float())
    return weight if codes.order is None else weight[:, codes.order.argsort()]


def _span(kind: Quantisation, inputs: int) -> int:
    return inputs if kind.group == -1 else min(kind.group, inputs)


def _read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], kind: Quantisation, device: str) -> Codes:
    outputs, inputs = shape
    span = _span(kind, inputs)
    if outputs * kind.bits % 32 or (kind.method == "gptq" and inputs * kind.bits % 32):
        raise BadInput("expected sizes that fill whole words", field=name, value=[*shape], file=checkpoint.directory)
    groups, words = -(-inputs // span), outputs * kind.bits // 32
    size = (inputs, words) if kind.method == "awq" else (inputs * kind.bits // 32, outputs)
    codes = checkpoint.tensor(f"{name}.qweight", size, (torch.int32,)).to(device)
    zeros = checkpoint.tensor(f"{name}.qzeros", (groups, words), (torch.int32,)).to(device)
    floats = (torch.float16, torch.bfloat16, torch.float32)
    scales = checkpoint.tensor(f"{name}.scales", (groups, outputs), floats).to(device).half()
    if not scales.isfinite().all():
        raise BadInput("expected values that float16 can hold", field=f"{name}.scales", file=checkpoint.directory)
    bias = f"{name}.bias"
    if bias in checkpoint and checkpoint.tensor(bias, (outputs,)).any():  # GPTQ writers store zeros for none
        expected = "expected zeros: linear layers with a bias are not served"
        raise BadInput(expected, field=bias, file=checkpoint.directory)
    order = _order(checkpoint, name, inputs, span, kind)
    codes = unpack_interleaved(codes).T if kind.method == "awq" else unpack(codes.T, kind.bits)
    zeros = unpack_interleaved(zeros) if kind.method == "awq" else unpack(zeros, kind.bits)
    if order is not None:
        order = order.to(device)
        codes = codes[:, order]
    return Codes(codes, scales.T, zeros.T + kind.zero_offset, order)


def _order(checkpoint: Checkpoint, name: str, inputs: int, span: int, kind: Quantisation) -> torch.Tensor | None:
    """Inputs sorted by their groups; None if they already are."""
    field = f"{name}.g_idx"
    if field not in checkpoint and not kind.act_order:
        return None
    groups = checkpoint.tensor(field, (inputs,), (torch.int32, torch.int64)).long()
    regular = torch.arange(inputs) // span
    if torch.equal(groups, regular):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], regular):
        raise BadInput(f"expected {span} inputs in each group", field=field, file=checkpoint.directory)
    return order


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack (rows, words) int32 to (rows, words · 32 / bits) uint8. Codes follow each other across word boundaries."""
    if bits == 4:
        octets = words.contiguous().view(torch.uint8)
        return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)
    wide = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    first = torch.arange(words.shape[1] * 32 // bits, device=words.device) * bits
    word, shift = first // 32, first % 32
    codes = (wide[:, word] >> shift) | (wide[:, word + 1] << (32 - shift))
    return (codes & ((1 << bits) - 1)).to(torch.uint8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `unpack`; codes (rows, n) with n · bits a multiple of 32."""
    shifts = torch.arange(bits, device=codes.device)
    stream = ((codes.long().unsqueeze(-1) >> shifts) & 1).flatten(1).view(len(codes), -1, 32)
    words = (stream << torch.arange(32, device=codes.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_interleaved(words: torch.Tensor) -> torch.Tensor:
    """Unpack (rows, words) int32 to (rows, 8 · words) uint8, in AWQ's order."""
    place = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    codes: torch.Tensor = unpack(words, 4).view(len(words), -1, 8)[..., place]
    return codes.flatten(1)
