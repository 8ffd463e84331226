"""Speed of the kernels, compared with the device's ceilings and with libraries.

    python -m benchmarks.kernels --device cuda [--out FILE]

Ceilings (copying, a bf16 product, both on random values) and the time of a kernel that does nothing are measured in the
same run. Every time is a median with rotated buffers, in a CUDA graph. Targets of bandwidth are judged from 256 MB up:
below, a launch is a good part of the time, and rows say how much longer they take than it (`over_launch`, seconds).
Exit code 4 when a target of TARGETS is missed. `--device cpu` goes the same way on small shapes to see that it runs;
targets are not judged there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks import kernel_peers
from benchmarks.kernel_peers import FLASHINFER, HUMMING
from benchmarks.provenance import provenance
from kernels.cases import SAMPLING_KINDS, Cases, random_layer
from kernels.decode_attention import decode_attention
from kernels.error_compensator import compensated_gemm
from kernels.microbenchmark import Case, Timing, measure
from kernels.prefill_attention import prefill_attention
from kernels.shapes import Shape
from kernels.w4_gemm import dequantise, quantise, w4_gemm
from kernels.w4_gemm.pack import GROUP, PackedWeight
from live.device import device_name, versions

TARGETS = {
    "decode attention, caches of 256 MB and more": (">=", 0.85, "of copy bandwidth"),
    "W4 at M = 1, 8192² and larger": (">=", 0.70, "of copy bandwidth"),
    "W4 at M = 1, 4096² and larger, tinygemm / ours": (">=", 1.0, "times as fast"),
    "EC over W4 at M = 1, a layer of Llama-2-7B": ("<=", 0.08, "more time"),
    "EC over W4 at M ≥ 512, a layer of Llama-2-7B": ("<=", 0.12, "more time"),
    "RMSNorm, RoPE, SiLU·mul, 256 MB and more": (">=", 0.85, "of copy bandwidth"),
}
"""Targets, judged by the worst row: relation, figure, and what the figure is a share of. At M ≥ 512 a compensator reads
and writes the product once more, which alone is 7 to 10 % of the time."""

JUDGED_BYTES = 256 << 20
"""Bytes that a kernel must move for a target of bandwidth to be judged."""

MISSED = 4
LLAMA_2_7B = Shape(32, 4096, 11008, heads=32, kv_heads=32, head_dim=128, vocabulary=32000)
LLAMA_31_8B = Shape(32, 4096, 14336, heads=32, kv_heads=8, head_dim=128, vocabulary=128256)
SMALL = Shape(2, 256, 512, heads=4, kv_heads=2, head_dim=64, vocabulary=1024)
RANK = 28
BLOCK = 16

Rows = list[dict[str, Any]]


class Bench:
    """One device, its ceilings, and the measurements so far.

    Attributes:
        rows: of every measurement. judged: by target, the figures that it is judged by.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.small = device == "cpu"
        if self.small:
            torch.set_num_threads(1)
        self.dtype = torch.float32 if self.small else torch.bfloat16
        self.rows: Rows = []
        self.judged: dict[str, list[float]] = {name: [] for name in TARGETS}
        self.ceilings = {"copy": self._copy(), "matmul": self._matmul(), "launch": self._launch()}

    def time(self, case: Case, **more: Any) -> Timing:
        """Measure a case and keep a row of it."""
        timing = measure(case, self.device, budget=0.05 if self.small else 0.2, samples=5 if self.small else 15,
                         cold=0 if self.small else None)  # fmt: skip
        row = {"operation": case.operation, "sizes": dict(case.sizes), "seconds": timing.seconds}
        row |= {"spread": timing.spread, "of_copy": timing.bandwidth(case) / self.ceilings["copy"]}
        row |= {"over_launch": timing.seconds - self.ceilings["launch"], "clock": timing.clock}
        if case.flops:
            row["of_matmul"] = timing.throughput(case) / self.ceilings["matmul"]
        self.rows.append(row | more)
        return timing

    def call(self, name: str, sizes: dict[str, int], make: Callable[[], Callable[[], object]], moved: int) -> Timing:
        """Measure a library's call, which is no case of a kernel."""
        return self.time(Case(name, sizes, make, moved=moved, flops=0))

    def peer(
        self,
        name: str,
        sizes: dict[str, int],
        check: Callable[[], None],
        make: Callable[[], Callable[[], object]],
        moved: int,
        ours: float,
    ) -> None:
        """Measure an optional package's call, if it is here and passes its check; the row has its time over `ours`."""
        try:
            check()
            self.call(name, sizes, make, moved)
        except Exception as error:  # another project's compiler failed; measure the rest
            self.absent(name, sizes, error)
        else:
            self.rows[-1]["ratio"] = self.rows[-1]["seconds"] / ours

    def absent(self, name: str, sizes: dict[str, int], error: Exception) -> None:
        """Keep a row that says why there is no measurement."""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self.rows.append({"operation": name, "sizes": sizes, "absent": reason})

    def random(self, *size: int) -> torch.Tensor:
        """Values of variance 1."""
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def _copy(self) -> float:
        """Bytes read and written a second by the faster of a copy and an elementwise kernel.

        A copy in a graph may go through a copy engine, which moved 2.8 TB/s on an H200 whose kernels move 4.3.
        """
        size = 1 << (21 if self.small else 29)

        def make(call: Callable[..., object]) -> Callable[[], object]:
            source = torch.randint(256, (size,), device=self.device).to(torch.int16)
            target = torch.empty_like(source)
            return lambda: call(source, out=target)

        cases = [
            Case("copy", {"bytes": 2 * size}, functools.partial(make, call), moved=4 * size, flops=0)
            for call in (lambda source, out: out.copy_(source), torch.neg)
        ]
        return max(measure(case, self.device, rotate=False).bandwidth(case) for case in cases)

    def _launch(self) -> float:
        """Seconds of a kernel that does next to nothing, among others in a graph."""

        def make() -> Callable[[], object]:
            number = torch.zeros(1, device=self.device)
            return lambda: number.fill_(1.0)

        return measure(Case("launch", {}, make, moved=0, flops=0), self.device, rotate=False).seconds

    def _matmul(self) -> float:
        size = 256 if self.small else 8192

        def make() -> Callable[[], object]:
            a, b = self.random(size, size), self.random(size, size)
            return lambda: a @ b

        case = Case("matmul", {"size": size}, make, moved=0, flops=2 * size**3, footprint=3 * size * size * 2)
        return measure(case, self.device, rotate=False).throughput(case)


def elementwise(bench: Bench) -> None:
    """RMSNorm, rotary positions and SiLU·mul."""
    shape = SMALL if bench.small else LLAMA_31_8B
    tokens = [8] if bench.small else [1, 64, 2048, 32768]
    cases = Cases(shape, bench.device, bench.dtype)
    for make in (cases.rms_norm, cases.rope_kv_write, cases.silu_mul):
        for case in map(make, tokens):
            timing = bench.time(case)
            if case.moved >= JUDGED_BYTES or bench.small:
                share = timing.bandwidth(case) / bench.ceilings["copy"]
                bench.judged["RMSNorm, RoPE, SiLU·mul, 256 MB and more"].append(share)


def attention(bench: Bench) -> None:
    """Decodes over paged caches, and chunks of prompts; compared with PyTorch's fused attention on caches in one piece,
    and with FlashInfer's on paged ones."""
    shape = SMALL if bench.small else LLAMA_31_8B
    batches, contexts = ([2], [64]) if bench.small else ([1, 8, 64], [512, 2048, 8192])
    cases = Cases(shape, bench.device, bench.dtype)
    for case in itertools.starmap(cases.decode_attention, itertools.product(batches, contexts)):
        timing = bench.time(case)
        if case.moved >= JUDGED_BYTES or bench.small:
            share = timing.bandwidth(case) / bench.ceilings["copy"]
            bench.judged["decode attention, caches of 256 MB and more"].append(share)
        _fused(bench, shape, case.sizes["batch"], 1, case.sizes["context"], case.moved)
        _flashinfer(bench, shape, case.sizes["batch"], 1, case.sizes["context"], case.moved, timing.seconds)
    for chunk in [32] if bench.small else [512, 2048, 8192]:
        case = cases.prefill_attention(1, chunk, 0)
        timing = bench.time(case)
        _fused(bench, shape, 1, case.sizes["chunk"], case.sizes["chunk"], case.moved)
        _flashinfer(bench, shape, 1, case.sizes["chunk"], case.sizes["chunk"], case.moved, timing.seconds)


def _fused(bench: Bench, shape: Shape, batch: int, queries: int, tokens: int, moved: int) -> None:
    def make() -> Callable[[], object]:
        q = bench.random(batch, shape.heads, queries, shape.head_dim)
        k, v = (bench.random(batch, shape.kv_heads, tokens, shape.head_dim) for _ in range(2))
        attend = functional.scaled_dot_product_attention
        return lambda: attend(q, k, v, is_causal=queries > 1, enable_gqa=True)

    bench.call("torch sdpa", {"batch": batch, "queries": queries, "tokens": tokens}, make, moved)


def _flashinfer(bench: Bench, shape: Shape, batch: int, queries: int, tokens: int, moved: int, ours: float) -> None:
    """The last `queries` tokens of sequences of `tokens`."""
    blocks, scale = -(-tokens // BLOCK), shape.head_dim**-0.5

    def operands() -> list[torch.Tensor]:
        cache = (batch * blocks, BLOCK, shape.kv_heads, shape.head_dim)
        tables = torch.randperm(batch * blocks, device=bench.device).view(batch, blocks).to(torch.int32)
        bounds = torch.arange(0, batch * queries + 1, queries, device=bench.device, dtype=torch.int32)
        q = bench.random(batch * queries, shape.heads, shape.head_dim)
        return [q, bench.random(*cache), bench.random(*cache), tables, bounds, tokens - bounds.diff()]

    def check() -> None:
        q, keys, values, tables, bounds, contexts = arguments = operands()
        if queries == 1:
            expected = decode_attention(q, keys, values, tables, contexts + 1, scale)
        else:
            expected = prefill_attention(q, keys, values, tables, bounds, contexts, scale)
        kernel_peers.check(kernel_peers.paged_attention(*arguments)(), expected)

    sizes = {"batch": batch, "queries": queries, "tokens": tokens}
    bench.peer(FLASHINFER, sizes, check, lambda: kernel_peers.paged_attention(*operands()), moved, ours)


def sampling(bench: Bench) -> None:
    """Greedy, all of the vocabulary, and with exclusions; no target."""
    shape, rows = (SMALL, [2]) if bench.small else (LLAMA_31_8B, [1, 8, 64, 256])
    cases = Cases(shape, bench.device, bench.dtype)
    for kind, sequences in itertools.product(SAMPLING_KINDS, rows):
        bench.time(cases.sampling(sequences, kind))


def four_bits(bench: Bench) -> None:
    """Square products and those of Llama-2-7B, few tokens and many, compared with cuBLAS, tinygemm and
    humming-kernels."""
    squares = [256] if bench.small else [4096, 8192, 16384]
    for size in squares:
        for tokens in [1] if bench.small else [1, 16, 512, 4096]:
            timing = _w4(bench, tokens, size, size)
            dense = (size * size + 2 * tokens * size) * bench.dtype.itemsize
            sizes = {"tokens": tokens, "outputs": size, "inputs": size}
            bench.call("torch linear", sizes, functools.partial(_linear, bench, tokens, size), dense)
            tiny = _tinygemm(bench, tokens, size)
            _humming(bench, tokens, size, timing.seconds)
            if tokens > 1:
                continue
            if tiny is not None:
                bench.judged["W4 at M = 1, 4096² and larger, tinygemm / ours"].append(tiny.seconds / timing.seconds)
            if size >= 8192 or bench.small:
                share = _packed_bytes(size, size, 1, bench) / timing.seconds / bench.ceilings["copy"]
                bench.judged["W4 at M = 1, 8192² and larger"].append(share)


def _linear(bench: Bench, tokens: int, size: int) -> Callable[[], object]:
    x, weight = bench.random(tokens, size), bench.random(size, size)
    return lambda: functional.linear(x, weight)


def _packed_bytes(outputs: int, inputs: int, tokens: int, bench: Bench) -> int:
    packed = outputs * inputs // 2 + outputs * (inputs // GROUP) * 2
    return packed + tokens * (outputs + inputs) * bench.dtype.itemsize


def _w4(bench: Bench, tokens: int, outputs: int, inputs: int) -> Timing:
    def make() -> Callable[[], object]:
        weight, _ = random_layer(outputs, inputs, RANK, GROUP, bench.device)
        x = bench.random(tokens, inputs)
        return lambda: w4_gemm(x, weight)

    sizes = {"tokens": tokens, "outputs": outputs, "inputs": inputs}
    return bench.call("w4_gemm", sizes, make, _packed_bytes(outputs, inputs, tokens, bench))


def _tinygemm(bench: Bench, tokens: int, size: int) -> Timing | None:
    """PyTorch's own 4-bit product; None where this build has none for the device."""

    def make() -> Callable[[], object]:
        x = torch.randn(tokens, size, device=bench.device, dtype=torch.bfloat16)
        scales = torch.randn(size // GROUP, size, 2, device=bench.device, dtype=torch.bfloat16)
        if bench.small:
            codes = torch.randint(16, (size, size), dtype=torch.int32)
            packed = torch._convert_weight_to_int4pack_for_cpu(codes, 2)
            return lambda: torch._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)
        pairs = torch.randint(256, (size, size // 2), dtype=torch.uint8, device=bench.device)
        packed = torch._convert_weight_to_int4pack(pairs, 8)
        return lambda: torch._weight_int4pack_mm(x, packed, GROUP, scales)

    sizes = {"tokens": tokens, "outputs": size, "inputs": size}
    try:
        return bench.call("torch tinygemm", sizes, make, _packed_bytes(size, size, tokens, bench))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        bench.absent("torch tinygemm", sizes, error)
        return None


def _humming(bench: Bench, tokens: int, size: int, ours: float) -> None:
    def operands() -> tuple[PackedWeight, torch.Tensor]:
        weight = quantise(torch.randn(size, size, device=bench.device) * size**-0.5, group=GROUP)
        return weight, torch.randn(tokens, size, device=bench.device, dtype=torch.bfloat16)

    def check() -> None:
        weight, x = operands()
        kernel_peers.check(kernel_peers.product(weight)(x), x.float() @ dequantise(weight).T)

    def make() -> Callable[[], object]:
        weight, x = operands()
        return functools.partial(kernel_peers.product(weight), x)

    sizes = {"tokens": tokens, "outputs": size, "inputs": size}
    bench.peer(HUMMING, sizes, check, make, _packed_bytes(size, size, tokens, bench), ours)


def compensators(bench: Bench) -> None:
    """A layer's four products with and without compensators: fused as dispatched, and as a chain of library calls."""
    shape = SMALL if bench.small else LLAMA_2_7B
    for tokens in [1, 16] if bench.small else [1, 16, 512, 2048, 4096]:
        sums = dict.fromkeys(("w4", "ec", "chain"), 0.0)
        for outputs, inputs in shape.linear().values():
            for form in sums:
                sums[form] += _compensated(bench, form, tokens, outputs, inputs).seconds
        over = {form: sums[form] / sums["w4"] - 1 for form in ("ec", "chain")}
        bench.rows.append({"operation": "layer of 4-bit products", "sizes": {"tokens": tokens}, **sums, "over": over})
        if tokens == 1:
            bench.judged["EC over W4 at M = 1, a layer of Llama-2-7B"].append(over["ec"])
        if tokens >= 512 or (bench.small and tokens > 1):
            bench.judged["EC over W4 at M ≥ 512, a layer of Llama-2-7B"].append(over["ec"])


def _compensated(bench: Bench, form: str, tokens: int, outputs: int, inputs: int) -> Timing:
    def make() -> Callable[[], object]:
        weight, compensator = random_layer(outputs, inputs, RANK, GROUP, bench.device)
        x = bench.random(tokens, inputs)
        if form == "w4":
            return lambda: w4_gemm(x, weight)
        if form == "ec":
            return lambda: compensated_gemm(x, weight, compensator)
        factors = kernel_peers.dense_factors(compensator, bench.dtype)
        return lambda: kernel_peers.compensated_chain(x, weight, factors)

    sizes = {"tokens": tokens, "outputs": outputs, "inputs": inputs}
    return bench.call(f"layer/{form}", sizes, make, _packed_bytes(outputs, inputs, tokens, bench))


PARTS = (elementwise, attention, sampling, four_bits, compensators)


def verdicts(bench: Bench) -> Iterator[dict[str, Any]]:
    """Each target with its worst figure."""
    for name, (relation, figure, of) in TARGETS.items():
        judgement = bench.judged[name]
        worst = (min(judgement) if relation == ">=" else max(judgement)) if judgement else None
        met = worst is not None and (worst >= figure if relation == ">=" else worst <= figure)
        yield {"target": name, "wanted": f"{relation} {figure:g} {of}", "worst": worst, "met": met}


def about(bench: Bench, schema: str) -> dict[str, Any]:
    """The device, the versions and the ceilings of the figures."""
    document = {"device": device_name(bench.device), "versions": versions(), "ceilings": bench.ceilings}
    return provenance(schema) | document


def _peer(bench: Bench, package: str) -> str:
    """A sentence on whether an optional package was compared, and if not everywhere, why not."""
    rows = [row for row in bench.rows if row["operation"] == package]
    compared = sum("seconds" in row for row in rows)
    reasons = sorted({row["absent"] for row in rows if "absent" in row})
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = "not installed"
    return "; ".join([version, f"compared at {compared} of {len(rows)} sizes", *reasons])


def main(arguments: list[str] | None = None) -> int:
    """The command's entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--parts", nargs="+", choices=[part.__name__ for part in PARTS], help="default: all")
    parser.add_argument("--out", type=Path, help="file for the JSON document")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, expected a device that is here")
    bench = Bench(options.device)
    judged = []
    for part in [part for part in PARTS if part.__name__ in (options.parts or [part.__name__])]:
        print(f"benchmarks.kernels: {part.__name__}", file=sys.stderr, flush=True)
        part(bench)
        judged = list(verdicts(bench))
        if options.out:  # after each, so that a run that is cut short leaves what it had
            peers = {package: _peer(bench, package) for package in (HUMMING, FLASHINFER)}
            document = about(bench, "twin.benchmark-kernels/2") | {"peers": peers}
            document |= {"judged": not bench.small, "targets": judged, "rows": bench.rows}
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for case in judged:
        worst = "nothing measured" if case["worst"] is None else f"{case['worst']:.3f}"
        verdict = "not judged" if bench.small else "met" if case["met"] else "MISSED"
        print(f"{verdict:<10} {case['target']}: {worst}, wanted {case['wanted']}")
    return MISSED if not bench.small and not all(case["met"] for case in judged) else 0


if __name__ == "__main__":
    sys.exit(main())
