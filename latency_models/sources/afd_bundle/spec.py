"""The scenario section of `source: afd_bundle`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from latency_models.io.paths import NameOrFile
from latency_models.sources.roofline.placement import Cache, Weights
from latency_models.sources.specification import SourceSpec, register
from latency_models.step_time import StepTime
from workloads.errors import BadInput

if TYPE_CHECKING:
    from latency_models.deployment.hardware import Hardware
    from latency_models.deployment.models import Model
    from latency_models.sources.afd_bundle.stages import CalibratedStages, DataSheetStages


@register
class AfdBundleSpec(SourceSpec):
    """An AFD bundle as one decode engine: attention and FFN on separate instances.

    Attributes:
        model: a built-in name, a model file, or a config.json. hardware: a built-in name or a hardware file.
        attention_instances, ffn_instances: x and y, one GPU and `ffn_gpus` GPUs each.
        microbatches: m in flight.
        weights: format of all weights; default: as the model is published. cache: format of the KV cache.
        link: network between instances; default: intra_node while the bundle fits in a node.
        context_cv: standard deviation over mean of the contexts of running sequences, for the wait at the FFN.
        max_model_len: tokens that the cache of one attention instance must hold, those of the longest request.
        calibration: a built-in name or file of α and β lines, in seconds, in place of data sheets.
    """

    source: Literal["afd_bundle"]
    model: NameOrFile
    hardware: NameOrFile
    attention_instances: PositiveInt = 1
    ffn_instances: PositiveInt = 1
    ffn_gpus: PositiveInt = 1
    microbatches: PositiveInt = 2
    weights: Weights | None = None
    cache: Cache = "bf16"
    link: Literal["intra_node", "inter_node"] | None = None
    context_cv: NonNegativeFloat = 0.0
    max_model_len: NonNegativeInt = 0
    calibration: NameOrFile | None = None

    def build(self, base: Path) -> StepTime:
        from latency_models.deployment.hardware import load_hardware
        from latency_models.deployment.hugging_face import any_model
        from latency_models.sources.afd_bundle.step_time import BundleStepTime, Shape

        model, hardware = any_model(self.model, base), load_hardware(self.hardware, base)
        weights = self._weights(model, hardware)
        shape = Shape(self.attention_instances, self.ffn_instances, self.ffn_gpus, self.microbatches)
        made = BundleStepTime(
            model, hardware, shape, self._stages(model, hardware, weights, shape.gpus, base),
            weights=weights, cache=self.cache, context_cv=self.context_cv,
        )  # fmt: skip
        if made.instance_tokens() < self.max_model_len:
            expected = (
                f"expected attention instances whose weights leave room for a KV cache of {self.max_model_len:,} "
            )
            expected += f"tokens, found {made.instance_tokens():,.0f}"
            raise BadInput(expected, field="step_time.max_model_len", value=self.max_model_len)
        return made

    def provenance(self) -> dict[str, Any]:
        found = {"source": self.source, "model": self.model, "hardware": self.hardware}
        shape = f"{self.attention_instances}A-{self.ffn_instances}F"
        return found | {"bundle": shape} | ({"calibration": self.calibration} if self.calibration else {})

    def check_ranks(self, data_parallel: int) -> None:
        if data_parallel != 1:
            expected = "expected 1: the attention instances of a bundle are within its step times"
            raise BadInput(expected, field="engine.data_parallel_size", value=data_parallel)

    def _weights(self, model: Model, hardware: Hardware) -> Weights:
        """The format of all weights."""
        from latency_models.deployment.models import ExpertFFN
        from latency_models.sources.roofline.placement import COMPUTED_IN

        if model.windowed_layers:
            expected = f"expected a model without sliding windows, {model.name} has them: no AFD step times"
            raise BadInput(expected, field="step_time.model", value=self.model)
        formats = model.formats(self.weights)
        weights = formats.experts if isinstance(model.ffn, ExpertFFN) else formats.linear
        if weights in ("fp4", "mxfp4", "int8") or COMPUTED_IN[weights] not in hardware.peak_flops:
            known = [name for name in ("bf16", "fp8") if name in hardware.peak_flops]
            raise BadInput(
                f"expected {' or '.join(known)} on {hardware.name}", field="step_time.weights", value=weights
            )
        if isinstance(model.ffn, ExpertFFN) and self.ffn_gpus > model.ffn.experts:
            expected = f"expected at most one GPU for each of the {model.ffn.experts} experts"
            raise BadInput(expected, field="step_time.ffn_gpus", value=self.ffn_gpus)
        return weights

    def _stages(
        self, model: Model, hardware: Hardware, weights: Weights, gpus: int, base: Path
    ) -> DataSheetStages | CalibratedStages:
        from latency_models.sources.afd_bundle.stages import CalibratedStages, DataSheetStages, Measured

        if self.calibration is not None:
            from latency_models.calibration.file_format import Calibration
            from latency_models.io.builtin_files import find_data
            from latency_models.io.config_io import checked, read_yaml
            from latency_models.pass_latency import PassLatency

            path = find_data("calibrations", self.calibration, base)
            lines = checked(Calibration, read_yaml(path), path)
            if lines.time_unit != "seconds":
                expected = f"expected a calibration in seconds, {lines.name} is in {lines.time_unit}"
                raise BadInput(expected, field="step_time.calibration", value=self.calibration)
            step = lines.step_line
            return CalibratedStages(PassLatency(step("attention"), step("ffn"), step("communication")), model.layers)
        inside = self.link == "intra_node" or (self.link is None and gpus <= hardware.devices_per_node)
        link = hardware.network.intra_node if inside else hardware.network.inter_node
        ratio = self.attention_instances / self.ffn_instances
        return DataSheetStages(
            model, hardware, self.ffn_gpus, ratio, weights, self.cache, link, Measured()
        )  # fmt: skip
