"""Efficiencies of kernels on the roofline, and of engines.

Kernels reach shares of a device's peaks: one takes launch + max(FLOPs / (peak · compute), bytes / (bandwidth ·
memory)).

The built-in files, one for each engine, are fitted by `python -m benchmarks.roofline_efficiency` to tables of measured
kernels. They have, for each kind of kernel, a fit for each device that was measured, and one for any other, which is
their geometric mean. Kinds that the tables of SGLang and TensorRT-LLM lack are vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from latency_models.deployment.hardware import Hardware, load_hardware
from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import WEIGHT_BYTES, ExpertFFN, Formats, Model, Weights
from latency_models.io.config_io import Strict, checked, read_yaml
from latency_models.io.files import FOLDER
from latency_models.sources.roofline.placement import Cache, DeviceMemory, Placement, check_placement, device_memory
from workloads.errors import BadInput

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


BLOCK_SIZE = 16
"""Tokens of a KV block, as vLLM has it by default."""


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One engine that can be had, with its `step_time` section and blocks of one attention replica."""

    devices: int
    step_time: dict[str, Any]
    memory: DeviceMemory
    num_gpu_blocks: int
    data_parallel: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV caches of all its attention replicas hold."""
        return self.num_gpu_blocks * BLOCK_SIZE * self.data_parallel

    def engine(self) -> dict[str, Any]:
        """The fields that this option gives an `engine` section."""
        ranks = {"data_parallel_size": self.data_parallel} if self.data_parallel > 1 else {}
        return {"num_gpu_blocks": self.num_gpu_blocks, "block_size": BLOCK_SIZE, **ranks}


@dataclass(frozen=True, slots=True)
class NoEngine:
    """One engine that cannot be had, and why: a line for a ledger. `fits`: memory is not the reason."""

    reason: str
    fits: bool = True


def engine_option(
    model: str | Path,
    hardware: str | Path,
    placement: Placement,
    *,
    base: Path = Path(),
    gpu_memory_utilization: float = 0.9,
    max_num_seqs: int = 256,
    max_model_len: int = 0,
) -> EngineOption | NoEngine:
    """The engine of a model on a device, or why there is none; `max_model_len`: tokens that the cache must hold."""
    shapes, device = any_model(model, base), load_hardware(hardware, base)
    try:
        check_placement(shapes, device, placement)
    except BadInput as error:
        return NoEngine(f"{error.field} {error.value}: {error.expected}")
    memory = device_memory(shapes, device, placement, gpu_memory_utilization, max_num_seqs)
    if memory.free <= 0:
        return NoEngine(_too_large(shapes, device, placement, memory, gpu_memory_utilization), fits=False)
    tokens = int(memory.kv_tokens)
    if tokens < max(max_model_len, BLOCK_SIZE):
        reason = f"the KV cache holds {tokens:,} tokens, and a request has up to {max(max_model_len, BLOCK_SIZE):,}"
        return NoEngine(reason, fits=False)
    return EngineOption(
        devices=placement.devices,
        step_time=step_time_section(model, hardware, placement, base),
        memory=memory,
        num_gpu_blocks=tokens // BLOCK_SIZE,
        data_parallel=placement.data_parallel,
    )


def step_time_section(
    model: str | Path, hardware: str | Path, placement: Placement, base: Path = Path()
) -> dict[str, Any]:
    """The `step_time` section of a placement, without the fields that have their defaults."""
    section: dict[str, Any] = {"source": "roofline", "model": str(model), "hardware": str(hardware)}
    usual = Placement()
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel", "cache")
    section |= {name: getattr(placement, name) for name in names if getattr(placement, name) != getattr(usual, name)}
    if Formats(placement.weights, placement.experts) == any_model(model, base).published_formats:
        return section
    experts = {"experts": placement.experts} if placement.experts != placement.weights else {}
    return section | {"weights": placement.weights} | experts


def placements(
    model: str | Path,
    *,
    weights: Weights | None = None,
    cache: Cache = "bf16",
    most_devices: int = 8,
    pipelines: bool = False,
    base: Path = Path(),
) -> list[Placement]:
    """The parallelisms to try for a model, by devices: powers of two. `engine_option` refuses those that do not fit.

    Experts are split over all devices (tensor parallel), or spread whole with as many attention replicas.
    """
    shapes = any_model(model, base)
    formats = shapes.formats(weights)
    kinds = formats.linear, formats.experts, cache
    options = []
    for devices in _doublings(most_devices):
        for stages in _doublings(devices if pipelines else 1):
            width = devices // stages
            options.append(Placement(width, stages, 1, False, *kinds))
            for replicas in _doublings(width)[1:] if isinstance(shapes.ffn, ExpertFFN) else ():
                options.append(Placement(width // replicas, stages, replicas, True, *kinds))
    return options


def _doublings(limit: int) -> list[int]:
    """Powers of two up to a limit."""
    return [1 << i for i in range(limit.bit_length())]


def _too_large(model: Model, hardware: Hardware, placement: Placement, memory: DeviceMemory, share: float) -> str:
    usable = hardware.memory_capacity * share - memory.reserved
    formats = Formats(placement.weights, placement.experts if isinstance(model.ffn, ExpertFFN) else placement.weights)
    a_weight = f" ({WEIGHT_BYTES[formats.linear]:g} bytes a weight)" if formats.linear == formats.experts else ","
    return (
        f"{model.name} in {formats}{a_weight} puts "
        f"{memory.weights / 1e9:.1f} GB on each of {placement.devices} {hardware.name}, which has "
        f"{usable / 1e9:.1f} GB for weights and cache"
    )
