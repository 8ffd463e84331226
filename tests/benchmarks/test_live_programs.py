"""Other projects' kernels get the operands of ours, and topologies are compared with the tokens of one engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import kernel_peers
from benchmarks.topologies import first_difference, main
from kernels.prefill_attention.reference import prefill_attention
from kernels.w4_gemm import quantise
from kernels.w4_gemm.pack import unpack
from live.generation import make_generation
from live.models import packed

SCALE = 16**-0.5


class Wrapper:
    """Both of FlashInfer's wrappers: pages of all sequences one after another, with their starts and last sizes."""

    def __init__(self, workspace: Any, layout: str, use_tensor_cores: bool = False) -> None:
        assert layout == "NHD"
        self.decodes = use_tensor_cores

    def plan(self, *sizes: Any, causal: bool = False, q_data_type: Any) -> None:
        assert causal != self.decodes
        *bounds, starts, pages, last, _, _, _, self.block_size = sizes
        self.tables = torch.zeros(len(last), int(starts.diff().max()), dtype=torch.int32)
        for row, begin, end in zip(self.tables, starts[:-1], starts[1:], strict=True):
            row[: end - begin] = pages[begin:end]
        self.lengths = (starts.diff() - 1) * self.block_size + last
        self.bounds = bounds[0] if bounds else torch.arange(len(last) + 1, dtype=torch.int32)

    def run(self, q: Any, cache: tuple[Any, Any]) -> Any:
        return prefill_attention(q, *cache, self.tables, self.bounds, self.lengths - self.bounds.diff(), SCALE)


@pytest.mark.parametrize("chunks", [(3, 1, 5), (1, 1, 1)], ids=["prompts", "decodes"])
def test_flashinfer_gets_the_same_pages(chunks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**dict.fromkeys(names, Wrapper)))
    q, cache = torch.randn(sum(chunks), 4, 16), [torch.randn(30, 4, 2, 16) for _ in range(2)]
    tables = torch.randperm(30).view(3, 10).to(torch.int32)
    bounds = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32)
    arguments = q, *cache, tables, bounds, torch.tensor([0, 15, 31], dtype=torch.int32)
    result = kernel_peers.paged_attention(*arguments)()
    expected = prefill_attention(*arguments, SCALE)
    kernel_peers.check(result, expected)
    with pytest.raises(kernel_peers.Disagreement):
        kernel_peers.check(result.flip(0), expected)


def test_humming_gets_the_same_codes() -> None:
    weight = quantise(torch.randn(256, 128))
    words = kernel_peers.gptq_words(weight)
    assert torch.equal(packed.unpack(words.T, 4), unpack(weight.qweight, 4)[:256, :128].to(torch.uint8))


TINY = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama.json"


def test_a_bundle_gives_the_tokens_of_one_engine(tmp_path: Path) -> None:
    out = tmp_path / "topologies.json"
    sizes = ["--batch-size", "2", "--prompt", "8", "--output", "4", "--repeats", "1"]
    assert main(["--device", "cpu", "--model", str(TINY), *sizes, "--out", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert list(runs) == ["one engine", "2A-1F, one stream, kernels", "2A-1F, one stream, graphs"]
    assert {row["different"] for row in runs.values()} == {0}


@pytest.mark.parametrize(
    ("tokens", "difference"),
    [([5, 6, 7], ""), ([5, 8, 1], "exchanged"), ([5, 9, 7], "different"), ([4, 6, 7], "different")],
)
def test_only_the_first_difference_counts(tokens: list[int], difference: str) -> None:
    """The second token's runner-up is 0.05 nats less likely, the first's by 1."""
    reference = make_generation(0, [1], 3, logprobs=2)
    reference.output += [5, 6, 7]
    reference.top_logprobs += [[(5, -1.0), (4, -2.0)], [(6, -1.0), (8, -1.05)], [(7, -1.0), (1, -3.0)]]
    assert first_difference(tokens, reference, 0.1) == difference
