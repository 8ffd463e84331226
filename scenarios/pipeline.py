"""Pipeline parallelism of an engine: `engine.pipeline`, beside `engine.pipeline_parallel_size`."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from latency_models.io.config_io import Strict
from latency_models.stages import StageLink, Stages, stage_layers
from latency_models.step_time import StepTime
from workloads.errors import BadInput


class StageLinkSpec(Strict):
    """The link from one stage to the next.

    Attributes:
        bandwidth: bytes/s. latency: seconds of the shortest message.
        bytes_per_token: activations of one token: vLLM sends two tensors of the hidden size, each spread over the
            tensor-parallel ranks.
    """

    bandwidth: PositiveFloat
    latency: NonNegativeFloat = 0.0
    bytes_per_token: NonNegativeFloat


class PipelineSpec(Strict):
    """The stages of an engine.

    Attributes:
        layers: of each stage, as `VLLM_PP_LAYER_PARTITION`. Default: divided as vLLM does, where the step times know
            the model, else in equal parts.
        link: between stages; default: that of the step times, where they know it (roofline).
    """

    layers: list[PositiveInt] | None = Field(default=None, min_length=1)
    link: StageLinkSpec | None = None

    def build(self, stages: int, step_time: StepTime | None) -> Stages:
        """Divide an engine into stages.

        Raises:
            BadInput: another number of stages or layers, or an unknown link.
        """
        known = step_time.measured_deployment() if step_time else None
        layers = known.model.layers if known is not None and known.model is not None else None
        if self.layers is not None:
            if len(self.layers) != stages:
                expected = f"expected {stages} numbers, one for each stage of pipeline_parallel_size"
                raise BadInput(expected, field="engine.pipeline.layers", value=self.layers)
            if layers is not None and sum(self.layers) != layers:
                expected = f"expected {layers} layers in all, as the model of step_time has"
                raise BadInput(expected, field="engine.pipeline.layers", value=self.layers)
            divided = self.layers
        elif layers is None:
            divided = [1] * stages
        elif layers < stages:
            expected = f"expected at most the layers there are ({layers})"
            raise BadInput(expected, field="engine.pipeline_parallel_size", value=stages)
        else:
            divided = stage_layers(layers, stages)
        if self.link is not None:
            return Stages(tuple(divided), StageLink(**self.link.model_dump()))
        if step_time is None or step_time.send_seconds(1) is None:
            expected = "expected bandwidth and bytes_per_token, since step_time does not know the link between stages"
            raise BadInput(expected, field="engine.pipeline.link")
        return Stages(tuple(divided))
