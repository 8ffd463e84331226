"""Shares of a device's peaks that kernels reach.

A kernel takes launch + max(FLOPs / (peak · compute), bytes / (bandwidth · memory)).

The built-in files, one for each engine, are fitted by `python -m benchmarks.roofline_efficiency` to tables of measured
kernels. They have, for each kind of kernel, a fit for each device that was measured, and one for any other, which is
their geometric mean. Kinds that the tables of SGLang and TensorRT-LLM lack are vLLM's.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from latency_models.deployment.hardware import Hardware
from latency_models.io.builtin_files import FOLDER
from latency_models.io.config_io import Strict, checked, read_yaml

Backend: TypeAlias = Literal["vllm", "sglang", "trtllm"]
"""Engines, as aiconfigurator names them."""

Kind: TypeAlias = Literal[
    "linear_bf16", "linear_fp8", "linear_fp4",
    "experts_bf16", "experts_fp8", "experts_fp4", "experts_mxfp4", "experts_int4",
    "prompt_attention_bf16", "prompt_attention_fp8", "decode_attention_bf16", "decode_attention_fp8",
    "prompt_latent", "decode_latent", "prompt_index", "decode_index",
    "prompt_gdn", "decode_gdn", "prompt_kda", "decode_kda",
    "elementwise", "all_reduce", "all_reduce_pcie",
    "all_to_all", "all_to_all_ll", "all_to_all_nodes", "all_to_all_nodes_ll",
]  # fmt: skip
"""Kinds of kernels, by the format of their weights or of the KV cache; all-reduces over a fabric or over PCIe. Those of
an index score cached tokens and choose among them (DSA); those of linear attention have its name. All-to-alls take rows
to the devices of their experts and back, in a node or over nodes, and as DeepEP's for high throughput or low latency
(`ll`)."""

PCIE = 1e11
"""Bytes/s below which the network in a node is PCIe: 16 lanes of generation 5 have 64 GB/s in one direction."""


def all_reduce_kind(hardware: Hardware) -> Kind:
    """The kind of all-reduces in a node of this device."""
    return "all_reduce_pcie" if hardware.network.intra_node < PCIE else "all_reduce"


ONE_SHOT = 2**21
"""Bytes, of the messages of all devices, from which an all-reduce takes two shots (scatter and gather) rather than one,
in which each device reads all messages: 512 KB among four, 256 KB among eight. Two devices always take one."""


class Reached(Strict):
    """One fit.

    `launch`: seconds of a kernel that does nothing; `each_device`: more for each device beyond two, and `two_shots` for
    a message too large for one shot (all-reduces). `compute`, `memory`: shares of the peak; above 1 where caches beat
    the memory. `padding`: cached tokens beside each decode's own. `spread`: deviation of the logarithm of measured over
    fitted time among shapes, and among devices for one that was not measured. `error`: median of |fitted − measured| /
    measured.
    """

    launch: NonNegativeFloat
    each_device: NonNegativeFloat = 0.0
    two_shots: NonNegativeFloat = 0.0
    compute: PositiveFloat | None = None
    memory: PositiveFloat
    padding: NonNegativeFloat = 0.0
    spread: NonNegativeFloat
    error: NonNegativeFloat
    kernels: PositiveInt


class KindOfKernel(Strict):
    """Fits of one kind: of any device, and of those that were measured, by the name of their hardware file."""

    any: Reached
    devices: dict[str, Reached]

    def of(self, device: str) -> Reached:
        return self.devices.get(device, self.any)


class EngineTime(Strict):
    """Time of a step that no kernel table has, fitted to served TPOT.

    `layer`: seconds of each layer in every step, `prompt_layer`: more in one with prompts, which has no full CUDA
    graph. `per_sequence`: of the host for each token. `spread`: deviation of the logarithm of measured over predicted
    TPOT.
    """

    layer: NonNegativeFloat
    per_sequence: NonNegativeFloat
    prompt_layer: NonNegativeFloat
    spread: NonNegativeFloat
    error: NonNegativeFloat
    rows: PositiveInt


class Efficiency(Strict):
    """The file. `backend`: the engine whose kernels these are."""

    schema_: Literal["twin.kernel-efficiency/1"] = Field(alias="schema")
    backend: Backend = "vllm"
    sources: list[str]
    kernels: dict[Kind, KindOfKernel]
    engine: EngineTime


@cache
def built_in_efficiency(backend: Backend = "vllm") -> Efficiency:
    """The fits of an engine's kernels that come with the package."""
    return load_efficiency(FOLDER / "efficiency" / f"{backend}.yaml")


def load_efficiency(path: Path) -> Efficiency:
    """Read a file of fits."""
    return checked(Efficiency, read_yaml(path), path)


def at_the_peaks(efficiency: Efficiency) -> Efficiency:
    """Kernels that reach every peak, launched in no time; what is not bound by one of memory or FLOP/s takes none."""
    free = Reached(launch=0.0, compute=1.0, memory=1e12, spread=0.0, error=0.0, kernels=1)
    kernels: dict[Kind, KindOfKernel] = {
        kind: KindOfKernel(
            any=free if kind.startswith(("elementwise", "all_")) else free.model_copy(update={"memory": 1.0}),
            devices={},
        )
        for kind in efficiency.kernels
    }
    engine = EngineTime(layer=0.0, per_sequence=0.0, prompt_layer=0.0, spread=0.0, error=0.0, rows=1)
    return efficiency.model_copy(update={"kernels": kernels, "engine": engine})
