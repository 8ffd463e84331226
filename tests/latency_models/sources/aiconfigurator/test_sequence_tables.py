"""Latent, sparse and linear attention from tables: at the tables' own points, times are the tables' rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from latency_models.deployment.models import load_model
from latency_models.interpolation import Curve, Surface
from latency_models.io.files import read_columns
from latency_models.sources.aiconfigurator.kernels import Placement, attention_times
from latency_models.sources.aiconfigurator.tables import READERS, AttentionKind, KernelTables
from workloads.errors import BadInput

MODULE = "op_name,model,kv_cache_dtype,gemm_type,num_heads,batch_size,isl,step,latency"
STATE = "op_name,kernel_source,phase,batch_size,seq_len,num_k_heads,head_k_dim,num_v_heads,head_v_dim,latency"


def tables_of(folder: Path, *kinds: AttentionKind, **rows: list[str]) -> KernelTables:
    """Tables of these rows, and of kinds of grouped queries, of 2 and 1 ms whatever the batch."""
    tables = {
        "context_attention": {kind: Curve([(1.0, 2e-3), (8192.0, 2e-3)]) for kind in kinds},
        "generation_attention": {
            kind: Surface({count: Curve([(1.0, 1e-3), (8192.0, 1e-3)]) for count in (1, 64)}) for kind in kinds
        },
    }
    for name, lines in rows.items():
        path = folder / f"{name}_perf.txt"
        path.write_text("\n".join(lines) + "\n")
        tables[name] = dict(READERS[name](read_columns(path)))
    return KernelTables(folder, tables)


@pytest.mark.parametrize(("name", "repository"), [("mla", "deepseek-ai/DeepSeek-V3"), ("dsa", "zai-org/GLM-5")])
def test_a_module_is_a_whole_attention_layer(name: str, repository: str, tmp_path: Path) -> None:
    model, other = load_model(repository), "another/model-of-an-unknown-shape"
    heads = model.attention.heads // 8
    formats = f"{repository},bfloat16,fp8_block,{heads}"
    modules = {
        f"{name}_context_module": [
            MODULE,
            f"c,{formats},1,256,0,0.4", f"c,{formats},1,512,0,0.7", f"c,{formats},4,256,0,9", f"c,{formats},1,256,64,9",
            f"c,{other},bfloat16,fp8_block,{heads},1,256,0,9",
        ],
        f"{name}_generation_module": [
            MODULE,
            f"g,{formats},8,1,1023,0.11", f"g,{formats},8,1,4095,0.13", f"g,{formats},16,1,1023,0.2",
            f"g,{formats},16,1,4095,0.3",
        ],
    }  # fmt: skip
    tables = tables_of(tmp_path, **modules)
    placement = Placement(tensor_parallel=8, weights="fp8_block")
    context, generation = attention_times(tables, model, placement)
    layers = model.layers
    assert [context.at(tokens) for tokens in (256, 512)] == pytest.approx([layers * 0.4e-3, layers * 0.7e-3])
    rows = {(8, 1024): 0.11e-3, (8, 4096): 0.13e-3, (16, 1024): 0.2e-3, (16, 4096): 0.3e-3}
    for (count, cached), seconds in rows.items():
        assert generation.at(count, cached) == pytest.approx(layers * seconds)
    with pytest.raises(BadInput, match=f"{name}_context_module: got ModuleKind"):
        attention_times(tables, model, Placement(tensor_parallel=4, weights="fp8_block"))


def test_linear_attention_adds_a_convolution_and_the_fastest_recurrence(tmp_path: Path) -> None:
    model = load_model("qwen3.5-397b-a17b")
    shape = "2,128,8,128"  # a rank of 8
    rows = [
        STATE,
        f"gdn,causal_conv1d_fn,context,1,512,{shape},0.02", f"gdn,chunked,context,1,512,{shape},0.03",
        f"gdn,causal_conv1d_update,generation,64,1,{shape},0.005", f"gdn,packed,generation,64,1,{shape},0.015",
        f"gdn,slower,generation,64,1,{shape},0.1", f"gdn,causal_conv1d_update,generation,1,1,{shape},0.001",
        f"gdn,packed,generation,1,1,{shape},0.002", f"gdn,causal_conv1d_fn,context,1,4096,{shape},0.2",
    ]  # fmt: skip  # the last has no recurrence
    tables = tables_of(tmp_path, AttentionKind("float16", "float16", 4, 1, 256), gdn=rows)
    context, generation = attention_times(tables, model, Placement(tensor_parallel=8))
    assert context.at(512) == pytest.approx(15 * 2e-3 + 45 * 0.05e-3)
    assert generation.at(64, 100) == generation.at(64, 8000) == pytest.approx(15 * 1e-3 + 45 * 0.02e-3)
    assert generation.at(1, 100) == pytest.approx(15 * 1e-3 + 45 * 0.003e-3)


def test_windows_have_kernels_of_their_own(tmp_path: Path) -> None:
    model = load_model("gpt-oss-120b")
    kinds = [AttentionKind("float16", "float16", 64, 8, 64, window) for window in (0, 128)]
    context = {kind: Curve([(1.0, seconds)]) for kind, seconds in zip(kinds, (2e-3, 1e-3), strict=True)}
    generation = {kind: Surface({1: Curve([(1.0, 3e-3)])}) for kind in kinds}
    tables = KernelTables(tmp_path, {"context_attention": context, "generation_attention": generation})
    prompts, decodes = attention_times(tables, model, Placement())
    assert (prompts.at(1), decodes.at(1, 1)) == pytest.approx((18 * 3e-3, 36 * 3e-3))
    del context[kinds[1]]
    with pytest.raises(BadInput, match=r"context_attention: got AttentionKind\(.*head_dim=64"):
        attention_times(tables, model, Placement())


def test_tables_of_a_convolution_alone_are_named(tmp_path: Path) -> None:
    """Mamba-2's have columns of other names, and no recurrence."""
    rows = ["op_name,kernel_source,nheads,latency", "mamba2,causal_conv1d_fn,32,0.1"]
    tables = tables_of(tmp_path, AttentionKind("float16", "float16", 32, 2, 128), mamba2=rows)
    with pytest.raises(
        BadInput, match="mamba2: expected the recurrence of mamba2, of which these tables have no timing"
    ):
        attention_times(tables, load_model("nemotron-3-nano-30b-a3b"), Placement())
