"""Kernels at the shapes of real models against float64, each launched twice for equality to the bit.

    python -m benchmarks.gpu_turn.numbers --device cuda [--tiny] --out FILE

Fresh memory is full of NaN, so that what a kernel forgets to write shows. An error is the root mean square of the
difference over that of the result. Exit code 4 if one is above its limit, or two launches differ.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_turn.stages import stage_parser
from benchmarks.provenance import provenance
from kernels import decode_attention, error_compensator, expert_gemm, prefill_attention, rms_norm, silu_mul, w4_gemm
from kernels.cases import random_layer
from kernels.decode_attention import reference as decode_reference
from kernels.error_compensator import reference as compensator_reference
from kernels.expert_gemm import reference as expert_reference
from kernels.prefill_attention import reference as prefill_reference
from kernels.rms_norm import reference as norm_reference
from kernels.sampling import SamplingMetadata, SamplingParams, sample
from kernels.silu_mul import reference as silu_reference
from kernels.w4_gemm import reference as w4_reference
from live.device import device_name, versions

WRONG = 4
LIMIT = 0.01
"""Results in bfloat16 have an error of 0.0017 by their rounding alone; a wrong tile, row or scale gives above 0.05."""

POISON_BYTES = 512 << 20
BLOCK = 16


@dataclass(frozen=True)
class Check:
    """One operation at one shape, with its reference, and the arguments of both."""

    name: str
    sizes: dict[str, int]
    operation: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]

    def exact(self) -> torch.Tensor:
        """The reference's result for the same arguments in float64, in which it then computes."""
        wide = (
            part.double() if isinstance(part, torch.Tensor) and part.is_floating_point() else part
            for part in self.arguments
        )
        return self.reference(*wide).double()


class Numbers:
    """The shapes of a device: real ones, or small ones."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.device = device
        self.tiny = tiny
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def random(self, *size: int) -> torch.Tensor:
        """Values of variance 1."""
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def checks(self) -> Iterator[Check]:
        """All checks, one after another, so that only one has its tensors in memory."""
        yield from self._compensated()
        yield from self._packed()
        yield from self._attention()
        yield from self._rows()
        yield from self._experts()

    def _compensated(self) -> Iterator[Check]:
        for outputs, inputs in [(384, 512)] if self.tiny else [(4096, 4096), (4096, 11008), (12288, 4096)]:
            for rank in (28,) if self.tiny else (28, 60, 64, 120):
                weight, compensator = random_layer(outputs, inputs, rank, 128, self.device)
                for tokens in (1, 20) if self.tiny else (1, 16, 64, 300, 600):
                    x = self.random(tokens, inputs)
                    yield Check(
                        "error_compensator", {"tokens": tokens, "outputs": outputs, "inputs": inputs, "rank": rank},
                        error_compensator.compensated_gemm, compensator_reference.compensated_gemm,
                        (x, weight, compensator),
                    )  # fmt: skip

    def _packed(self) -> Iterator[Check]:
        for bits in (4, 3):
            for outputs, inputs in [(384, 512)] if self.tiny else [(4096, 4096), (4096, 14336), (28672, 4096)]:
                weight, _ = random_layer(outputs, inputs, 16, 128, self.device, bits)
                for tokens in (1, 20) if self.tiny else (1, 2, 16, 33, 64, 256, 511, 600):
                    x = self.random(tokens, inputs)
                    yield Check(
                        "w4_gemm", {"bits": bits, "tokens": tokens, "outputs": outputs, "inputs": inputs},
                        w4_gemm.w4_gemm, w4_reference.w4_gemm, (x, weight),
                    )  # fmt: skip

    def _attention(self) -> Iterator[Check]:
        heads, kv_heads, head_dim = (4, 2, 64) if self.tiny else (32, 8, 128)
        scale = head_dim**-0.5
        for batch, context in [(2, 40)] if self.tiny else [(1, 100), (1, 8191), (8, 2048), (64, 1000), (256, 500)]:
            q, keys, values, tables = self._paged(batch, context, heads, kv_heads, head_dim)
            lengths = torch.randint(1, context + 1, (batch,), device=self.device, dtype=torch.int32)
            yield Check(
                "decode_attention", {"batch": batch, "context": context},
                decode_attention.decode_attention, decode_reference.decode_attention,
                (q, keys, values, tables, lengths, scale),
            )  # fmt: skip
        for chunk, context in [(24, 8)] if self.tiny else [(17, 500), (512, 0), (2048, 0), (512, 2048)]:
            _, keys, values, tables = self._paged(1, chunk + context, heads, kv_heads, head_dim)
            q = self.random(chunk, heads, head_dim)
            bounds = torch.tensor([0, chunk], device=self.device, dtype=torch.int32)
            contexts = torch.tensor([context], device=self.device, dtype=torch.int32)
            yield Check(
                "prefill_attention", {"chunk": chunk, "context": context},
                prefill_attention.prefill_attention, prefill_reference.prefill_attention,
                (q, keys, values, tables, bounds, contexts, scale),
            )  # fmt: skip

        for tokens in (24,) if self.tiny else (512, 2000):
            q = self.random(tokens, heads + kv_heads, head_dim)
            v, attend = self.random(tokens, kv_heads, head_dim), prefill_attention.prompt_attention
            yield Check("prompt_attention", {"tokens": tokens}, attend, attend, (q[:, :heads], q[:, heads:], v, scale))

    def _paged(self, batch: int, context: int, heads: int, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values, and block tables with pages in random order."""
        pages = -(-context // BLOCK)
        tables = torch.randperm(batch * pages, device=self.device).view(batch, pages).to(torch.int32)
        keys, values = (self.random(batch * pages, BLOCK, kv_heads, head_dim) for _ in range(2))
        return self.random(batch, heads, head_dim), keys, values, tables

    def _rows(self) -> Iterator[Check]:
        hidden, vocabulary = (64, 1000) if self.tiny else (4096, 128256)
        for tokens in (3,) if self.tiny else (1, 257, 4096):
            x, weight = self.random(tokens, hidden), self.random(hidden)
            yield Check(
                "rms_norm", {"tokens": tokens, "hidden": hidden},
                rms_norm.rms_norm, norm_reference.rms_norm, (x, weight, 1e-6),
            )  # fmt: skip
            yield Check(
                "silu_mul", {"tokens": tokens, "intermediate": hidden // 2},
                silu_mul.silu_mul, silu_reference.silu_mul, (x,),
            )  # fmt: skip
        for rows in (2,) if self.tiny else (1, 64, 256):
            logits = self.random(rows, vocabulary)
            greedy = SamplingMetadata.of(
                [SamplingParams(temperature=0.0)] * rows, range(rows), torch.device(self.device)
            )
            yield Check(
                "greedy sampling", {"rows": rows, "vocabulary": vocabulary},
                lambda logits, parameters: sample(logits, parameters)[0],
                lambda logits, parameters: logits.argmax(-1), (logits, greedy),
            )  # fmt: skip

    def _experts(self) -> Iterator[Check]:
        experts, chosen, hidden, inner = (8, 2, 64, 32) if self.tiny else (128, 8, 2048, 768)
        gate_up, down = self.random(experts, 2 * inner, hidden), self.random(experts, hidden, inner)
        for tokens in (3,) if self.tiny else (1, 16, 300, 4096):
            x, logits = self.random(tokens, hidden) * hidden**-0.5, self.random(tokens, experts)
            weights, places = expert_gemm.route(logits, chosen)
            yield Check(
                "expert_mlp", {"tokens": tokens, "experts": experts},
                expert_gemm.expert_mlp, expert_reference.expert_mlp, (x, weights, places, gate_up, down),
            )  # fmt: skip


def poison(device: str) -> None:
    """Fill memory with NaN and give it back: PyTorch hands it out again as it is."""
    if device == "cuda":
        torch.full((POISON_BYTES // 4,), float("nan"), device=device)


def judge(check: Check, device: str) -> dict[str, Any]:
    """A row: the error, and whether two launches agree to the bit."""
    results = []
    for _ in range(2):
        poison(device)
        results.append(check.operation(*check.arguments).clone())
    exact = check.exact()
    difference = results[0].double() - exact
    error = (difference.square().mean() / exact.square().mean()).sqrt().item()
    equal = bool((results[0] == results[1]).all().item())
    right = equal and error <= LIMIT  # also False where it is no number
    return {"operation": check.name, "sizes": check.sizes, "error": error, "repeats": equal, "right": right}


def main(arguments: list[str] | None = None) -> int:
    """The command's entry point."""
    options = stage_parser(__doc__).parse_args(arguments)
    torch.manual_seed(0)
    head = {**provenance("twin.gpu-numbers/1"), "device": device_name(options.device), "versions": versions()}
    rows = []
    for check in Numbers(options.device, options.tiny).checks():
        rows.append(judge(check, options.device))
        if not rows[-1]["right"]:
            print(f"WRONG {rows[-1]}", flush=True)
        options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    wrong = sum(not row["right"] for row in rows)
    print(f"{len(rows)} checks, {wrong} wrong; largest error {max(row['error'] for row in rows):.2g}")
    return WRONG if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
