"""One tensor-parallel rank's part of a decoder: some heads of each attention layer, and some columns of each FFN.

The first linear layers of a stage (qkv; gate and up) are cut by outputs, and need no communication. The second (o;
down, of each expert too) are cut by inputs: each rank has a part of every sum, and the parts are added up. Everything
else is the same on each rank. An error compensator is cut with its weight: by outputs it is its rows of B; by inputs
its columns of A, and since the gate is no linear function, the parts of Ax are added up before it (SPEAR, section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from kernels.ec_tail import ec_tail
from kernels.error_compensator import Compensator, stage
from kernels.shapes import Shape
from kernels.w4_gemm import PackedWeight, part
from kernels.w4_gemm.pack import ROWS
from live.models.config import ModelConfig
from live.models.linear import Compensated, Group, Matrix, Reordered, Stacked, linear
from live.models.weights import DenseFFN, Experts, Layer
from workloads.errors import BadInput

FIELD = "tensor_parallel_size"


@dataclass(frozen=True)
class RowParallel:
    """A rank's columns of a weight, whose product is a part of a sum."""

    weight: Matrix
    group: Group

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute (..., inputs of this rank) to (..., outputs)."""
        return self.group.sum(linear(x, self.weight))


@dataclass(frozen=True)
class StagedProduct:
    """Ranks' parts of a compensated product before the sum: (ranks, n, hidden), latents (ranks, n, rank) float32."""

    outputs: torch.Tensor
    latents: torch.Tensor
    compensator: Compensator

    def add_rms_norm(
        self, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `kernels.rms_norm.add_rms_norm` of the sum."""
        return ec_tail(self.outputs, self.latents, residual, weight, self.compensator, epsilon)


@dataclass(frozen=True)
class CompensatedRowParallel:
    """A rank's columns of a packed weight with an error compensator, of which it has the columns of A and all of B."""

    weight: PackedWeight
    compensator: Compensator
    group: Group

    def stage(self, x: torch.Tensor) -> StagedProduct:
        """The parts of the product, (n, inputs of this rank) to (n, outputs)."""
        ranks, rows = self.group.size, len(x)
        outputs = x.new_empty(ranks, rows, self.weight.outputs)
        latents = x.new_empty(ranks, rows, self.compensator.rank, dtype=torch.float32)
        stage(x, self.weight, self.compensator, outputs[self.group.rank], latents[self.group.rank])
        self.group.gather(outputs, latents)
        return StagedProduct(outputs, latents, self.compensator)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute (n, inputs of this rank) to (n, outputs), for a caller that adds and normalises itself."""
        zeros = x.new_zeros(len(x), self.weight.outputs)
        return self.stage(x).add_rms_norm(zeros, zeros.new_ones(self.weight.outputs), 1.0)[1]


def config_of_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """The config of one rank's part, where several ranks may have one KV head; `BadInput` if it cannot be divided."""
    shape = config.shape
    for name in ("heads", "intermediate", "expert_intermediate"):
        if name == "intermediate" and shape.experts:
            continue
        if (size := getattr(shape, name)) % ranks:
            raise BadInput(f"expected a divisor of the model's {size} {name}", field=FIELD, value=ranks)
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        expected = f"expected a divisor or a multiple of the model's {shape.kv_heads} KV heads"
        raise BadInput(expected, field=FIELD, value=ranks)
    part_of_rank = replace(
        shape, heads=shape.heads // ranks, kv_heads=max(shape.kv_heads // ranks, 1),
        intermediate=shape.intermediate // ranks, expert_intermediate=shape.expert_intermediate // ranks,
    )  # fmt: skip
    return replace(config, shape=part_of_rank)


def layer_of_rank(layer: Layer, shape: Shape, group: Group) -> Layer:
    """One rank's part of a layer of a model with this shape; `BadInput` for a packed weight that cannot be cut."""
    rank, ranks = group.rank, group.size
    query, inner = shape.heads * shape.head_dim, shape.expert_intermediate if shape.experts else shape.intermediate
    key_parts = min(shape.kv_heads, ranks)
    keys = (shape.kv_heads * shape.head_dim, key_parts, rank * key_parts // ranks)
    gate_up = _rows([(inner, ranks, rank)] * 2)
    ffn = layer.ffn
    if isinstance(ffn, Experts):
        columns = _columns(inner, rank, ranks)
        down = ffn.down[..., columns.start : columns.stop].contiguous()
        ffn = Experts(ffn.gate_up[:, gate_up].contiguous(), down, group)
    elif ffn is not None:
        ffn = DenseFFN(cut_rows(ffn.gate_up, gate_up), cut_columns(ffn.down, _columns(inner, rank, ranks), group))
    return replace(
        layer,
        qkv=cut_rows(layer.qkv, _rows([(query, ranks, rank), keys, keys])),
        o=cut_columns(layer.o, _columns(query, rank, ranks), group),
        ffn=ffn,
    )


def _rows(parts: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """A rank's rows of matrices that are joined. `parts`: of each, its rows, its number of shares, and the share."""
    rows, begin = [], 0
    for size, shares, share in parts:
        columns = _columns(size, share, shares)
        rows.append(torch.arange(begin + columns.start, begin + columns.stop))
        begin += size
    return torch.cat(rows)


def _columns(size: int, share: int, shares: int) -> range:
    return range(share * size // shares, (share + 1) * size // shares)


def cut_rows(matrix: Matrix, rows: torch.Tensor) -> Matrix:
    """Some rows of a weight, (n,) int64."""
    if isinstance(matrix, torch.Tensor):
        return matrix[rows.to(matrix.device)].contiguous()
    if isinstance(matrix, PackedWeight):
        return part(matrix, rows.to(matrix.qweight.device))
    if isinstance(matrix, Reordered):
        return replace(matrix, weight=part(matrix.weight, rows.to(matrix.order.device)))
    if isinstance(matrix, Stacked):
        return _rows_of_stack(matrix, rows)
    assert isinstance(matrix, Compensated), "no other weights are loaded"
    compensator, missing = matrix.compensator, -len(rows) % ROWS
    rows = rows.to(compensator.up.device)
    rows_of_b = replace(
        compensator, up=pad(compensator.up[rows], (0, 0, 0, missing)), outputs=len(rows),
        up_scales=pad(compensator.up_scales[rows], (0, missing)), arrivals=torch.zeros_like(compensator.arrivals),
    )  # fmt: skip
    return Compensated(part(matrix.weight, rows), rows_of_b)


def _rows_of_stack(matrix: Stacked, rows: torch.Tensor) -> Stacked:
    """Some rows of each part, in the order in which they are stacked."""
    parts, begin = [], 0
    for weight in matrix.parts:
        end = begin + _outputs(weight)
        parts.append(cut_rows(weight, rows[(rows >= begin) & (rows < end)] - begin))
        begin = end
    return Stacked(tuple(parts))


def _outputs(matrix: Matrix) -> int:
    if isinstance(matrix, torch.Tensor):
        return len(matrix)
    weight = matrix.weight if isinstance(matrix, Reordered) else matrix
    assert isinstance(weight, PackedWeight)
    return weight.outputs


def cut_columns(matrix: Matrix, columns: range, group: Group) -> Matrix:
    """A rank's columns; `BadInput` for a packed weight whose groups of inputs would be cut, or are spread."""
    if isinstance(matrix, torch.Tensor):
        return RowParallel(matrix[:, columns.start : columns.stop].contiguous(), group)
    compensator = matrix.compensator if isinstance(matrix, Compensated) else None
    weight = matrix.weight if isinstance(matrix, Compensated) else matrix
    if not isinstance(weight, PackedWeight):
        expected = "expected 1: GPTQ's desc_act spreads the groups of inputs that ranks would have to share"
        raise BadInput(expected, field=FIELD, value=group.size)
    if weight.group and len(columns) % weight.group:
        expected = f"expected ranks with whole groups of {weight.group} inputs, of {weight.inputs}"
        raise BadInput(expected, field=FIELD, value=group.size)
    packed = part(weight, columns=columns)
    if compensator is None:
        return RowParallel(packed, group)
    down = compensator.down[:, columns.start : columns.stop].contiguous()
    share = replace(compensator, down=down, arrivals=torch.zeros_like(compensator.arrivals))
    return CompensatedRowParallel(packed, share, group)
