"""Settings of the engines of measured rows, from public scripts: cache format, tokens a step, sequences, arrivals.

The scripts are those of InferenceX (SemiAnalysisAI/InferenceX, `benchmarks/`), in the versions of the time of each
engine's release: scripts change, and with them the format of the cache. Rows of equal lengths come from
AIConfigurator's own runs, whose generator keeps the caches of dense models in FP8 where their weights are.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.error_board.rows import Row
from benchmarks.silicon import RANDOM_RANGE_MEAN
from latency_models.deployment.models import load_model
from latency_models.sources.roofline.placement import Cache
from latency_models.sources.roofline.spec import family

MAX_BATCHED_TOKENS = 8192
MAX_SEQS = 2048


@dataclass(frozen=True, slots=True)
class Script:
    """Settings of an engine.

    Attributes:
        cache: format of the KV cache. tokens: prompt tokens a step. sequences: that run at once.
        few, many: `scheduler_recv_interval` below and from MANY in flight.
    """

    cache: Cache = "bf16"
    tokens: int = MAX_BATCHED_TOKENS
    sequences: int = MAX_SEQS
    few: int = 1
    many: int = 1


MANY = 16

SCRIPTS: dict[tuple[str, str, str, str], Script] = {
    ("sglang", "deepseek-v3", "hopper", "fp8"): Script(tokens=32768, sequences=256),
    ("sglang", "deepseek-v3", "blackwell", "fp4"): Script("fp8", 16384, 256, 10, 30),
    ("sglang", "deepseek-v3", "blackwell", "fp8"): Script("fp8", 32768, 128, 10, 30),
    ("sglang", "qwen3.5-397b-a17b", "hopper", "fp8"): Script("fp8", 16384, 128),
    ("sglang", "qwen3.5-397b-a17b", "blackwell", "fp4"): Script("fp8", 32768, 128, 10, 30),
    ("sglang", "qwen3.5-397b-a17b", "blackwell", "fp8"): Script("fp8", 32768, 128, 10, 30),
    ("sglang", "qwen3.5-397b-a17b", "blackwell", "bf16"): Script("bf16", 32768, 128, 10, 30),
    ("sglang", "glm-5", "blackwell", "fp4"): Script("fp8", 32768, 256, 10, 10),
    ("sglang", "glm-5", "blackwell", "fp8"): Script("fp8", 32768),
    ("trtllm", "llama-3.1-70b", "hopper", "fp8"): Script("fp8", 16384),
    ("trtllm", "llama-3.1-70b", "blackwell", "fp4"): Script("fp8", 16384),
    ("trtllm", "llama-3.1-70b", "blackwell", "fp8"): Script("fp8", 16384),
    ("trtllm", "gpt-oss-120b", "hopper", "fp4"): Script(tokens=20000),
    ("trtllm", "gpt-oss-120b", "blackwell", "fp4"): Script("fp8", 20000, 512),
    ("vllm", "gpt-oss-120b", "blackwell", "fp4"): Script("fp8", sequences=512),
    ("vllm", "minimax-m2.5", "blackwell", "fp4"): Script("fp8"),
    ("vllm", "minimax-m2.5", "blackwell", "fp8"): Script("fp8"),
}
"""By engine, model, chip and format."""

LATER: dict[tuple[str, str, str, str], Script] = {
    ("sglang", "qwen3.5-397b-a17b", "fp8", "0.5.10.post1"): Script("fp8", 16384, MAX_SEQS, 10, 10),
    ("vllm", "minimax-m2.5", "fp8", "0.17.0"): Script(),
}
"""By engine, model, format and version: where scripts of another time say otherwise."""


def batch_wait(row: Row) -> tuple[int, float]:
    """`batch_wait_timeout_iters` and `batch_wait_max_tokens_ratio` of TensorRT-LLM, which has them without replicas."""
    short = row.isl == row.osl == 1024 * RANDOM_RANGE_MEAN
    if row.engine != "trtllm" or not short or row.decode.data_parallel > 1:
        return 0, 0.0
    if row.model == "llama-3.1-70b" and row.decode.tensor_parallel < 8:
        return 20, 0.9
    if (row.model, row.precision, row.version) == ("deepseek-v3", "fp8", "1.2.0rc6.post2") and row.in_flight >= 64:
        return 40, 0.8
    return 0, 0.0


def script(row: Row, chip: str) -> Script:
    """The settings of a row, as far as its script states them."""
    later = LATER.get((row.engine, row.model, row.precision, row.version))
    stated = later or SCRIPTS.get((row.engine, row.model, chip, row.precision))
    if stated:
        return stated
    kind = family(load_model(row.model))
    small = row.precision != "bf16" and (kind == "dense" or (kind == "latent" and row.engine == "trtllm"))
    return Script("fp8" if small else "bf16")
