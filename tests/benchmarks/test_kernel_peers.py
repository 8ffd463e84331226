"""Other projects' kernels are called with the operands of ours: here their interfaces compute with our references."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the kernels need the extra [live]")

from benchmarks import kernel_peers  # noqa: E402
from kernels.prefill_attention.reference import prefill_attention  # noqa: E402
from kernels.w4_gemm import quantise  # noqa: E402
from kernels.w4_gemm.pack import unpack  # noqa: E402
from live.models import packed  # noqa: E402

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
