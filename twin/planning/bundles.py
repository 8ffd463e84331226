"""AFD bundles as decode engines of a plan: from ratios and the workload's lengths to kinds of engines.

An attention instance decodes as many sequences as its memory holds at the 99.9 % quantile of their caches, as `twin
sweep --ratio` checks it (`twin.afd.memory`), and at most `engine.max_num_seqs`. A bundle has x times as many slots.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.hugging_face import any_model
from latency_models.io.config_io import checked
from latency_models.sources.afd_bundle import AfdBundleSpec, BundleStepTime
from scenarios.afd import Topology, parse_ratios
from scenarios.engine import DeviceSpec
from scenarios.planning import BundleSpec, EngineKindSpec, PlanSpec
from twin.afd.memory import LEVEL
from twin.theory.cycle import load_quantile
from workloads.errors import BadInput
from workloads.pairs import JointEmpirical

Document: TypeAlias = dict[str, Any]
Tokens: TypeAlias = NDArray[np.int64]

MOST_FFN_GPUS = 64
DEFAULT_SEQUENCES = 128
"""`engine.max_num_seqs` where a scenario does not say it."""


def with_bundles(spec: PlanSpec, prompts: Tokens, answers: Tokens, engine: Document, path: Path) -> PlanSpec:
    """The `plan` section with its bundles among the kinds of engines.

    `prompts`, `answers`: lengths of a sample of the requests. `engine`: the scenario's section. `path`: its file.
    """
    lengths = JointEmpirical(np.maximum(prompts, 1), np.maximum(answers, 1))
    longest = int((prompts + answers).max())
    kinds = [
        kind
        for i, bundle in enumerate(spec.bundles)
        for kind in Bundles(bundle, lengths, longest, engine, path.parent, named=len(spec.bundles) > 1).kinds(i)
    ]
    # Checked again, since names and prices of all kinds belong together.
    document = spec.model_dump(mode="json", exclude={"engines", "bundles"})
    return checked(PlanSpec, {**document, "engines": [*spec.engines, *kinds]}, path)


@dataclass(frozen=True)
class Bundles:
    """The kinds of one entry of `plan.bundles`. `named`: names have the GPU, since there are other entries."""

    spec: BundleSpec
    lengths: JointEmpirical
    longest: int
    engine: Document
    base: Path
    named: bool

    def kinds(self, index: int) -> list[EngineKindSpec]:
        """One kind for each ratio and size of FFN instances; `index` is the entry's, for errors."""
        spec = self.spec
        for name, load in ((spec.model, any_model), (spec.hardware, load_hardware)):
            load(name, self.base)  # names that are wrong are an error of the question, not of some candidates
        try:
            topologies = parse_ratios(spec.ratios)
        except BadInput as error:
            raise BadInput(error.expected, field=f"plan.bundles[{index}].ratios", value=spec.ratios) from None
        sizes = spec.ffn_gpus or [self._fewest()]
        return [self._kind(topology, gpus) for gpus in sizes for topology in topologies]

    def _kind(self, topology: Topology, gpus: int) -> EngineKindSpec:
        """One bundle, with as many slots as its attention instances have memory for."""
        spec, x, y = self.spec, topology.attention_instances, topology.ffn_instances
        section = self._section(gpus) | {"attention_instances": x, "ffn_instances": y}
        section |= {"context_cv": self._context_cv, "max_model_len": self.longest}
        share = float((self.engine.get("kv_memory") or {}).get("gpu_memory_utilization", 0.9))
        engine = {"max_num_seqs": x * self._slots(gpus, share), "kv_memory": {"gpu_memory_utilization": share}}
        gpu = Path(spec.hardware).stem
        device = DeviceSpec(type=spec.device or gpu, count=x + y * gpus, price_per_hour=spec.price_per_hour)
        name = f"{x}A{y}F" + (f"x{gpus}" if gpus > 1 else "")
        name = "-".join([gpu, name, *([spec.weights] if spec.weights else [])]) if self.named else name
        return EngineKindSpec(name=name, device=device, engine=engine, step_time=section, roles=["decode"])

    @cached_property
    def _context_cv(self) -> float:
        """Standard deviation over mean of the context of a slot at a random step."""
        pmf = self.lengths.slot_load_pmf()
        loads = np.arange(len(pmf))
        mean = float(pmf @ loads)
        return float(f"{math.sqrt(float(pmf @ (loads - mean) ** 2)) / mean:.3g}")

    def _slots(self, gpus: int, share: float) -> int:
        """The most sequences of an attention instance whose caches fit; 1 where none do, which its memory refuses."""
        try:
            tokens = self._model(gpus).instance_tokens(share)
        except BadInput:
            return 1  # its candidates are refused with the reason
        numbers = range(1, int(self.engine.get("max_num_seqs", DEFAULT_SEQUENCES)) + 1)
        fits = bisect_left(numbers, True, key=lambda n: load_quantile(self.lengths, n, LEVEL, in_step=False) > tokens)
        return max(fits, 1)

    def _fewest(self) -> int:
        """The fewest GPUs of an FFN instance whose memory holds its weights; the most there can be, if none do."""
        gpus = 1
        while gpus < MOST_FFN_GPUS:
            try:
                self._model(gpus).kv_tokens(0.9, 1)
            except BadInput as error:
                if "leave room" not in error.expected:
                    break
                gpus *= 2
            else:
                break
        return gpus

    def _section(self, gpus: int) -> Document:
        spec = self.spec
        section: Document = {"source": "afd_bundle", "model": spec.model, "hardware": spec.hardware, "ffn_gpus": gpus}
        section |= {"microbatches": spec.microbatches, "cache": spec.cache}
        stated = {"weights": spec.weights, "link": spec.link}
        return section | {name: value for name, value in stated.items() if value is not None}

    def _model(self, gpus: int) -> BundleStepTime:
        source = checked(AfdBundleSpec, self._section(gpus), None).build(self.base)
        assert isinstance(source, BundleStepTime)
        return source
