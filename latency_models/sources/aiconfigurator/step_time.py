"""Step times from the kernels of one model."""

from __future__ import annotations

from dataclasses import dataclass

from latency_models.interpolation import Curve, blend
from latency_models.origin import MeasuredDeployment
from latency_models.sources.aiconfigurator.kernels import ModelKernels
from latency_models.step_time import StepTimeModel
from schedulers.batches import Batch


@dataclass(frozen=True, slots=True)
class Corrections:
    """Corrections for times that kernels timed one by one leave out.

    Attributes:
        decode: factor on the kernels of decodes. Below 1 where the engine fuses what the tables time separately; above
            1 for small kernels missing from the tables, and for caches and clocks that favour a single kernel.
        prefill: factor on the kernel time that prompts add. Above 1 where sustained GEMMs lower the clock.
        prompt_step: further seconds of a step with prompts, which runs without a full CUDA graph.
        per_sequence: seconds of the host for each decode: sampling, detokenising, answering.
    """

    decode: float = 1.0
    prefill: float = 1.0
    prompt_step: float = 0.0
    per_sequence: float = 0.0


class AiconfiguratorStepTime(StepTimeModel):
    """The sum of GEMMs and all-reduces by rows, attention by context, and the head by sequences.

    A step takes the time of its decodes plus the time that prompts add. Decodes of uneven lengths count as decodes of
    their mean length. A later chunk of a prompt costs attention over all tokens so far, less that over earlier tokens.
    Decode attention is never faster than the memory: some tables were measured with the KV cache in L2.
    """

    def __init__(self, kernels: ModelKernels, corrections: Corrections | None = None) -> None:
        self.kernels, self.corrections = kernels, corrections or Corrections()
        self._by_decodes: dict[int, tuple[float, Curve, Curve, float]] = {}

    def measured_deployment(self) -> MeasuredDeployment:
        """See `StepTime.measured_deployment`. The kernels are sums over the layers of one model."""
        kernels = self.kernels
        return MeasuredDeployment(kernels.origin, ranks=kernels.origin.tensor_parallel, notes=kernels.notes)

    def seconds(self, batch: Batch) -> float:
        """Duration of one step, seconds."""
        decodes = batch.n_decodes
        duration = self._decode(decodes, batch.decode_kv) if decodes else 0.0
        if batch.chunks:
            duration += self.corrections.prefill * self._prompts(batch) + self.corrections.prompt_step
        return duration

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        """See `StepTime.decode_seconds`."""
        return [self._decode(decodes, tokens) for tokens in range(kv, kv + decodes * steps, decodes)]

    def in_range(self, batch: Batch) -> bool:
        """True if the tables cover every kernel of a step: its rows, contexts and decodes."""
        kernels, decodes = self.kernels, batch.n_decodes
        fits = batch.tokens <= kernels.rows.x[-1]
        if decodes:
            fits = fits and kernels.generation.covers(decodes, batch.decode_kv / decodes)
        return fits and all(chunk.context + chunk.tokens <= kernels.context.x[-1] for chunk in batch.chunks)

    def _decode(self, decodes: int, kv: int) -> float:
        """Seconds of a step of decodes alone."""
        known = self._by_decodes.get(decodes)
        if known is None:
            linear = self.kernels.rows.at(decodes) + self.kernels.head.at(decodes)
            known = self._by_decodes[decodes] = (linear, *self.kernels.generation.between(decodes))
        linear, low, high, share = known
        attention = max(blend(low, high, share, kv / decodes), self.kernels.kv_token * kv)
        return self.corrections.decode * (linear + attention) + self.corrections.per_sequence * decodes

    def _prompts(self, batch: Batch) -> float:
        """Kernel seconds that the prompts of a batch add to its decodes."""
        kernels, decodes = self.kernels, batch.n_decodes
        added = kernels.rows.at(batch.tokens) - (kernels.rows.at(decodes) if decodes else 0.0)
        if batch.outputs > decodes:
            added += kernels.head.at(batch.outputs) - (kernels.head.at(decodes) if decodes else 0.0)
        context = kernels.context
        attention = context.y[0]  # one launch for all prompts; each adds what it takes beyond that
        for chunk in batch.chunks:
            attention += max(context.at(chunk.context + chunk.tokens) - context.at(chunk.context), 0.0)
        return max(added, 0.0) + attention
