"""The peer is timed only if it is there and right. It needs a GPU: here a stand-in reads what it is given."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the kernels need the extra [live]")

from benchmarks import humming_peer  # noqa: E402
from benchmarks.kernels import Bench, _humming, _peer  # noqa: E402
from kernels.w4_gemm import PackedWeight, quantise  # noqa: E402


class StandIn:
    """A layer of GPTQ's tensors, input by input; `zero` is what it takes for the middle."""

    zero = 8

    def __init__(self, shape_n: int, shape_k: int, weight_config: dict[str, Any], torch_dtype: torch.dtype) -> None:
        assert weight_config["quant_method"] == "gptq"
        assert torch_dtype == torch.bfloat16
        self.outputs = shape_n
        self.inputs = shape_k
        self.group = weight_config["group_size"]

    def to(self, device: torch.device) -> StandIn:
        return self

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        assert tensors["qweight"].shape == (self.inputs // 8, self.outputs)
        assert tensors["scales"].shape == (self.inputs // self.group, self.outputs)
        self.dense = torch.empty(self.outputs, self.inputs)
        for k in range(self.inputs):
            code = (tensors["qweight"][k // 8] >> (4 * (k % 8))) & 15
            self.dense[:, k] = tensors["scales"][k // self.group].float() * (code - self.zero)

    def transform(self) -> None:
        pass

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() @ self.dense.T).bfloat16()


@pytest.fixture
def operands() -> tuple[PackedWeight, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight = quantise(torch.randn(200, 256, generator=generator))
    return weight, torch.randn(3, 256, generator=generator).bfloat16()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    class Layer(StandIn):
        pass

    module = ModuleType("humming.layer")
    module.HummingLayer = Layer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", module)
    return Layer


@pytest.fixture
def bench() -> Bench:
    return Bench("cpu")


def test_the_peer_gets_our_codes(installed: type[StandIn], operands: tuple[PackedWeight, torch.Tensor]) -> None:
    weight, x = operands
    product = humming_peer.checked_product(weight, x)
    assert product(x).shape == (3, 200)


@pytest.mark.parametrize("zero", [7, float("nan")])
def test_a_peer_that_is_wrong_is_not_timed(
    zero: float, installed: type[StandIn], operands: tuple[PackedWeight, torch.Tensor], bench: Bench
) -> None:
    installed.zero = zero  # type: ignore[assignment]
    with pytest.raises(humming_peer.Disagreement, match="disagrees with x · Ŵᵀ by"):
        humming_peer.checked_product(*operands)
    _humming(bench, 1, 256, ours=1.0)
    (row,) = bench.rows
    assert row["operation"] == "humming"
    assert "disagrees" in row["absent"]
    assert "compared at 0 of 1 sizes; disagrees" in _peer(bench)


def test_a_peer_that_is_right_is_timed(installed: type[StandIn], bench: Bench) -> None:
    _humming(bench, 1, 256, ours=1e-6)
    timed, ratio = bench.rows
    assert ratio == {"operation": "humming / w4_gemm", "sizes": timed["sizes"], "ratio": timed["seconds"] / 1e-6}
    assert _peer(bench).endswith("compared at 1 of 1 sizes")


def test_a_peer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    _humming(bench, 1, 256, ours=1.0)
    assert "absent" in bench.rows[0]
    assert "humming" in _peer(bench)
