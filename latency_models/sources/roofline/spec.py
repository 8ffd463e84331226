"""The scenario section of `source: roofline`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from latency_models.deployment.expert_load import ExpertLoad
from latency_models.deployment.hardware import load_hardware
from latency_models.io.builtin_files import FilePath, NameOrFile
from latency_models.sources.registry import SourceSpec, register
from latency_models.sources.roofline.efficiency import Backend, built_in_efficiency, load_efficiency
from latency_models.sources.roofline.placement import Cache, Placement, Weights, check_placement
from latency_models.step_time import StepTime
from workloads.errors import BadInput

if TYPE_CHECKING:
    from latency_models.deployment.models import Model


@register
class RooflineSpec(SourceSpec):
    """A model on a device, from data sheets and what kernels reach of them: nothing needs to be measured.

    `model`, `hardware`: built-in names or files. `pipeline_parallel`: stages; one batch is under way at a time unless
    `engine.pipeline_parallel_size` is as large. `expert_parallel`: experts are spread whole over all devices of a
    stage. `weights`: default: as published; `experts`: as `weights`. `expert_load`: popularity of experts, and EPLB;
    default: even. `link`: of all-reduces; default: intra_node while a stage fits in a node. `backend`: vllm, sglang or
    trtllm. `efficiency`: a file of fits in place of the built-in one.
    """

    source: Literal["roofline"]
    model: NameOrFile
    hardware: NameOrFile
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    data_parallel: PositiveInt = 1
    expert_parallel: bool = False
    weights: Weights | None = None
    experts: Weights | None = None
    cache: Cache = "bf16"
    expert_load: ExpertLoad | None = None
    link: Literal["intra_node", "inter_node"] | None = None
    backend: Backend = "vllm"
    efficiency: FilePath | None = None

    def placement(self, model: Model) -> Placement:
        formats = model.formats(self.weights, self.experts)
        return Placement(
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            data_parallel=self.data_parallel,
            expert_parallel=self.expert_parallel,
            weights=formats.linear,
            experts=formats.experts,
            cache=self.cache,
        )

    def build(self, base: Path) -> StepTime:
        from latency_models.deployment.hugging_face import any_model
        from latency_models.sources.roofline.step_time import RooflineStepTime
        from latency_models.sources.roofline.work import expert_rows, kinds_of_parts

        model, hardware = any_model(self.model, base), load_hardware(self.hardware, base)
        placement = self.placement(model)
        try:
            check_placement(model, hardware, placement)
        except BadInput as error:
            raise BadInput(error.expected, value=error.value, field=f"step_time.{error.field}") from None
        load = expert_rows(model, placement, self.expert_load, base)
        efficiency = built_in_efficiency(self.backend)
        if self.efficiency:
            path = base / self.efficiency
            efficiency = load_efficiency(path)
            for kind in kinds_of_parts(model, hardware, placement).values():
                if kind not in efficiency.kernels:
                    raise BadInput(f"expected a fit of {kind}, which {model.name} has", field="kernels", file=path)
        return RooflineStepTime(model, hardware, placement, efficiency, link=self.link, load=load)

    def check_ranks(self, data_parallel: int) -> None:
        if data_parallel != self.data_parallel:
            expected = f"expected {data_parallel}, as engine.data_parallel_size"
            raise BadInput(expected, field="step_time.data_parallel", value=self.data_parallel)

    def check_stages(self, pipeline_parallel: int) -> None:
        """An engine of one stage in flight may have step times of several stages."""
        if pipeline_parallel not in (1, self.pipeline_parallel):
            expected = f"expected {pipeline_parallel}, as engine.pipeline_parallel_size"
            raise BadInput(expected, field="step_time.pipeline_parallel", value=self.pipeline_parallel)
