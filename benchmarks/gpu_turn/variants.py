"""Other settings of kernels, to choose from by measurement: this project's attention of prompts and PyTorch's, waves
of decode attention where lengths differ, its tiles and stages, bits that a pass of sampling finds, the number of tokens
from which packed weights are unpacked once, and how often a product of one token is split.

    python -m benchmarks.gpu_turn.variants --device cuda [--tiny] [--only TEXT] --out FILE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu_turn.stages import stage_parser
from benchmarks.kernels import LLAMA_31_8B, SMALL
from benchmarks.provenance import provenance
from kernels.cases import Cases
from kernels.decode_attention import decode_attention, decode_work
from kernels.decode_attention import triton as decode_kernels
from kernels.decode_attention import work_list as decode_lists
from kernels.microbenchmark import Case, measure
from kernels.sampling import triton as sampling_kernels
from kernels.shapes import Shape
from kernels.w4_gemm import quantise, w4_gemm
from kernels.w4_gemm import triton as w4_kernels
from kernels.w4_gemm.pack import GROUP
from live.device import device_name, versions

BLOCK = 16

Variant = tuple[str, list[AbstractContextManager[Any]], list[Case]]


def variants(device: str, tiny: bool) -> Iterator[Variant]:
    """The name of each setting, the changes that make it, and what is measured with it."""
    shape, dtype = (SMALL, torch.float32) if tiny else (LLAMA_31_8B, torch.bfloat16)
    yield from prompts(shape, device, dtype, tiny)
    mixes = {"lengths of 1,000": [1000] * 64, "one of 60,000": [1000] * 63 + [60000]}
    mixes["log-normal lengths"] = np.random.default_rng(1).lognormal(np.log(800), 1, 256).astype(int).tolist()
    for waves in (4,) if tiny else (2, 4, 8):
        change = mock.patch.object(decode_lists, "WAVES", waves)
        for mix, lengths in list(mixes.items())[: 1 if tiny else None]:
            case = decode_case(shape, lengths[: 3 if tiny else None], 65536, device, dtype)
            yield f"decode attention, {mix}, {waves} waves", [change], [case]
    sizes = [(2, 64)] if tiny else [(8, 8192), (64, 2048), (256, 1024)]
    cases = Cases(shape, device, dtype)
    decodes = [cases.decode_attention(batch, context) for batch, context in sizes]
    for tile, stages in [(64, 3)] if tiny else [(64, 3), (64, 4), (64, 5), (32, 3), (32, 5), (128, 3)]:
        changes = [
            mock.patch.object(decode_kernels, "tile_for", lambda head_dim, element, tile=tile: tile),
            mock.patch.object(decode_kernels, "STAGES", stages),
        ]
        yield f"decode attention, tile {tile}, {stages} stages", changes, decodes
    products = list(four_bits(shape, device, dtype, [4] if tiny else [128, 256, 384, 512, 1024]))
    for name, tokens in (("packed", 1 << 30), ("unpacked", 1)):
        yield f"W4, {name}", [mock.patch.object(w4_kernels, "UNPACK_TOKENS", tokens)], products
    single = list(four_bits(shape, device, dtype, [1]))
    for split in (2,) if tiny else (1, 2, 3, 4, 6, 8):
        for stages in (3,) if tiny else (2, 3, 4):
            tiling = w4_kernels.Tiling(64, 16, split, 4, stages)
            change = mock.patch.object(w4_kernels, "select", lambda *_, tiling=tiling: tiling)
            yield f"W4 of one token, split by {split}, {stages} stages", [change], single
    draws = [cases.sampling(count, "filtered") for count in ([2] if tiny else [1, 64, 256])]
    for bits in (1, 2, 4):
        yield f"sampling, {bits} bits a pass", [mock.patch.object(sampling_kernels, "SEARCH_BITS", bits)], draws


def prompts(shape: Shape, device: str, dtype: torch.dtype, tiny: bool) -> Iterator[Variant]:
    """Attention of prompts without context, by this project's kernel and as the engine calls PyTorch's."""
    sizes = [24] if tiny else [512, 1024, 2048, 8192]
    cases = Cases(shape, device, dtype)
    yield "prompts, triton", [], [cases.prefill_attention(1, size, 0) for size in sizes]
    yield "prompts, PyTorch", [], [cases.prompt_attention(size) for size in sizes]
    for batch in () if tiny else (4, 16):
        ours = cases.prefill_attention(batch, 512, 0)
        flash = replace(ours, prepare=partial(_flash, shape, batch, 512, device, dtype))
        yield f"{batch} prompts, triton", [], [ours]
        yield f"{batch} prompts, FlashAttention of PyTorch", [], [flash]


def _flash(shape: Shape, batch: int, tokens: int, device: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    rows, scale = batch * tokens, shape.head_dim**-0.5
    q = torch.randn(rows, shape.heads, shape.head_dim, device=device, dtype=dtype)
    k, v = (torch.randn(rows, shape.kv_heads, shape.head_dim, device=device, dtype=dtype) for _ in range(2))
    bounds = torch.arange(0, rows + 1, tokens, device=device, dtype=torch.int32)
    flash = torch.ops.aten._flash_attention_forward
    return lambda: flash(q, k, v, bounds, bounds, rows, rows, 0.0, True, False, scale=scale)[0]


def four_bits(shape: Shape, device: str, dtype: torch.dtype, tokens: list[int]) -> Iterator[Case]:
    """The product of each linear layer of a decoder layer, at each number of tokens."""

    def prepare(count: int, outputs: int, inputs: int) -> Callable[[], torch.Tensor]:
        weight = quantise(torch.randn(outputs, inputs, device=device) * inputs**-0.5)
        x = torch.randn(count, inputs, device=device, dtype=dtype)
        return lambda: w4_gemm(x, weight)

    for layer, (outputs, inputs) in shape.linear().items():
        packed = outputs * inputs // 2 + outputs * inputs // GROUP * 2
        for count in tokens:
            yield Case(
                operation=f"w4_gemm/{layer}", sizes={"tokens": count, "outputs": outputs, "inputs": inputs},
                prepare=partial(prepare, count, outputs, inputs),
                moved=packed + count * (outputs + inputs) * dtype.itemsize, flops=2 * count * outputs * inputs,
            )  # fmt: skip


def decode_case(shape: Shape, lengths: list[int], longest: int, device: str, dtype: torch.dtype) -> Case:
    """Decodes of any lengths, whose tables hold up to `longest` tokens; pages are in order."""
    pages = [-(-length // BLOCK) for length in lengths]
    token = shape.kv_heads * shape.head_dim

    def prepare() -> Callable[[], torch.Tensor]:
        tables = torch.zeros(len(lengths), -(-longest // BLOCK), dtype=torch.int32)
        for i, (count, end) in enumerate(zip(pages, accumulate(pages), strict=True)):
            tables[i, :count] = torch.arange(end - count, end)
        size = (sum(pages), BLOCK, shape.kv_heads, shape.head_dim)
        keys, values = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
        q = torch.randn(len(lengths), shape.heads, shape.head_dim, device=device, dtype=dtype)
        places, ends = tables.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)
        work = decode_work(ends, places, keys)
        return lambda: decode_attention(q, keys, values, places, ends, shape.head_dim**-0.5, work=work)

    return Case(
        operation="decode_attention", sizes={"batch": len(lengths), "tokens": sum(lengths)}, prepare=prepare,
        moved=2 * sum(lengths) * token * dtype.itemsize, flops=4 * sum(lengths) * shape.heads * shape.head_dim,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command's entry point."""
    parser = stage_parser(__doc__)
    parser.add_argument("--only", default="", help="variants whose names contain this")
    options = parser.parse_args(arguments)
    head = {**provenance("twin.gpu-variants/1"), "device": device_name(options.device), "versions": versions()}
    rows: list[dict[str, Any]] = []
    for name, changes, cases in variants(options.device, options.tiny):
        for case in cases if options.only in name else []:
            row: dict[str, Any] = {"variant": name, "operation": case.operation, "sizes": dict(case.sizes)}
            with ExitStack() as stack:
                for change in changes:
                    stack.enter_context(change)
                try:
                    row["seconds"] = measure(case, options.device, budget=0.1, samples=9).seconds
                except Exception as error:  # a setting that does not fit: measure the others
                    row["absent"] = f"{type(error).__name__}: {error}"[:200]
            rows.append(row)
            shown = f"{1e6 * row['seconds']:.1f} µs" if "seconds" in row else row["absent"]
            print(f"{name}: {case.operation} {dict(case.sizes)}: {shown}", flush=True)
            options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
