"""Rotary positions, QK-norm and the write to pages, against float64 and against Hugging Face's own way to write it."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import rope_kv_write as dispatch
from kernels.rope_kv_write import Llama3Scaling, reference, rope_table, triton

TYPES = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Half the distance of two neighbouring numbers, relative."""


def tolerance(dtype: torch.dtype, head_dim: int) -> float:
    """Relative to the pair that turns: two half units of the type, since the interpreter cuts where a GPU rounds.

    In float32, the norm's sum errs by √n half units (twice that for where errors are not independent), and its
    inverse root, the weight, the table's two entries, the products and their sum by one or two each: 10 more.
    """
    return 2 * TYPES[dtype] + TYPES[torch.float32] * (2 * math.sqrt(head_dim) + 10)


def sample(
    tokens: int, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: str
) -> dict[str, torch.Tensor]:
    """Every third row from the second on is padding; slots are in random order."""
    generator = torch.Generator().manual_seed(tokens * 10007 + head_dim)
    blocks = -(-tokens // block_size) + 1
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[1::3] = -1
    cos, sin = rope_table(head_dim, 2048, 1e4)
    shape = (blocks, block_size, kv_heads, head_dim)
    arguments = {
        "qkv": 3 * torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=generator),
        "positions": torch.randint(0, 2048, (tokens,), generator=generator),
        "slots": slots,
        "cos": cos,
        "sin": sin,
        "k_cache": torch.full(shape, 7.0),
        "v_cache": torch.full(shape, 7.0),
        "q_norm": 1 + 0.2 * torch.randn(head_dim, generator=generator),
        "k_norm": 1 + 0.2 * torch.randn(head_dim, generator=generator),
    }
    rounded = ("qkv", "k_cache", "v_cache", "q_norm", "k_norm")
    return {
        name: tensor.to(device, dtype) if name in rounded else tensor.to(device) for name, tensor in arguments.items()
    }


def assert_near(result: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    pairs = torch.hypot(*exact.chunk(2, dim=-1)).repeat(1, 1, 2)
    assert result.isfinite().all()
    assert ((result.double() - exact).abs() <= tolerance(dtype, exact.shape[-1]) * pairs + 1e-30).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "block_size", "norm"),
    [(1, 16, 8, 128, 16, True), (7, 7, 1, 64, 1, False), (20, 3, 3, 80, 16, True), (2, 40, 20, 2, 5, False)],
)
def test_kernel_equals_float64(
    tokens: int, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, norm: bool, device: str
) -> None:
    arguments = sample(tokens, heads, kv_heads, head_dim, block_size, dtype, device)
    if not norm:
        del arguments["q_norm"], arguments["k_norm"]
    integers = ("positions", "slots")
    exact = {name: tensor if name in integers else tensor.double() for name, tensor in arguments.items()}
    untouched = arguments["k_cache"].view(-1, kv_heads, head_dim).clone()
    q = triton.rope_kv_write(**arguments)
    assert_near(q, reference.rope_kv_write(**exact), dtype)
    slots = arguments["slots"][arguments["slots"] >= 0]
    keys, values = (arguments[name].view(-1, kv_heads, head_dim) for name in ("k_cache", "v_cache"))
    assert_near(keys[slots], exact["k_cache"].view(-1, kv_heads, head_dim)[slots], dtype)
    assert torch.equal(values.double(), exact["v_cache"].view(-1, kv_heads, head_dim))
    written = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
    written[slots] = True
    assert torch.equal(keys[~written], untouched[~written])


@pytest.mark.usefixtures("poisoned")
def test_keys_are_kept_also_of_rows_that_are_not_written(device: str) -> None:
    shape = 7, 6, 3, 64, 4
    kernel, exact, plain = (sample(*shape, torch.float32, device) for _ in range(3))
    exact = {name: value.double() if value.is_floating_point() else value for name, value in exact.items()}
    kept = triton.rope_kv_write(**kernel, keep_keys=True)
    assert_near(kept, reference.rope_kv_write(**exact, keep_keys=True), torch.float32)
    assert torch.equal(kept[:, :6], triton.rope_kv_write(**plain))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(kernel[name], plain[name])


def test_reference_as_hugging_face_writes_it() -> None:
    """rotate_half and duplicated tables, one token and one head at a time."""
    inputs = sample(6, 4, 2, 8, 4, torch.float64, "cpu")
    inputs["cos"], inputs["sin"] = inputs["cos"].double(), inputs["sin"].double()
    q = dispatch.rope_kv_write(inputs["qkv"], **{name: value for name, value in inputs.items() if name != "qkv"})
    for token in range(6):
        heads = inputs["qkv"][token].view(8, 8)
        cos, sin = (torch.cat([inputs[name][inputs["positions"][token]]] * 2) for name in ("cos", "sin"))
        turned = []
        for h in range(6):
            x = heads[h] / (heads[h].square().mean() + 1e-6).sqrt() * inputs["q_norm" if h < 4 else "k_norm"]
            turned.append(x * cos + torch.cat((-x[4:], x[:4])) * sin)
        torch.testing.assert_close(q[token], torch.stack(turned[:4]))
        slot = int(inputs["slots"][token])
        if slot >= 0:
            torch.testing.assert_close(inputs["k_cache"][slot // 4, slot % 4], torch.stack(turned[4:]))
            torch.testing.assert_close(inputs["v_cache"][slot // 4, slot % 4], heads[6:])
        else:
            assert slot == -1


def test_a_quarter_turn() -> None:
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    cos, sin = torch.tensor([[0.0]]), torch.tensor([[1.0]])
    caches = [torch.zeros(1, 2, 1, 2) for _ in range(2)]
    zero = torch.tensor([0])
    q = reference.rope_kv_write(qkv, zero, torch.tensor([1]), cos, sin, *caches)
    assert q.tolist() == [[[-2.0, 1.0]]]
    assert caches[0].flatten().tolist() == [0, 0, -4, 3]
    assert caches[1].flatten().tolist() == [0, 0, 5, 6]


def test_table_by_hand() -> None:
    """Head of 4, θ = 100: frequencies 1 and 1/10."""
    cos, sin = rope_table(4, 3, 100.0)
    torch.testing.assert_close(cos[2], torch.tensor([math.cos(2.0), math.cos(0.2)]))
    torch.testing.assert_close(sin[1], torch.tensor([math.sin(1.0), math.sin(0.1)]))


def test_llama3_scaling_keeps_fast_rotations_and_slows_slow_ones() -> None:
    """Llama 3.1: wavelengths below 8192 / 4 stay, those above 8192 are 8 times as long, between them it is smooth."""
    plain = reference.rope_frequencies(128, 500000.0)
    scaled = reference.rope_frequencies(128, 500000.0, Llama3Scaling(8.0))
    wavelength = 2 * math.pi / plain
    fast, slow = wavelength < 2048, wavelength > 8192
    between = ~(fast | slow)
    assert min(fast.sum(), slow.sum(), between.sum()) > 3
    assert torch.equal(scaled[fast], plain[fast])
    torch.testing.assert_close(scaled[slow], plain[slow] / 8)
    for value, plain_one, length in zip(scaled[between], plain[between], wavelength[between], strict=True):
        smooth = (8192 / length - 1) / 3
        torch.testing.assert_close(value, (1 - smooth) * plain_one / 8 + smooth * plain_one)


def test_llama3_scaling_equals_transformers() -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=4096, num_attention_heads=32, head_dim=128, rope_theta=5e5, max_position_embeddings=131072,
        rope_scaling=scaling,
    )  # fmt: skip
    expected, scale = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert scale == 1.0
    torch.testing.assert_close(reference.rope_frequencies(128, 500000.0, Llama3Scaling(8.0)).float(), expected)
