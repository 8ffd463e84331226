"""A step's time from the kernels of one layer: `StepTime` from kernel tables."""

from __future__ import annotations

from pathlib import Path

from latency_models.kernel_tables.attention import AttentionTimes
from latency_models.kernel_tables.files import read_kernel_tables
from latency_models.kernel_tables.layers import ExpertTimes, head, kernels_a_step, linear_layers, moe_layers
from latency_models.kernel_tables.parallel import KernelTableSettings
from latency_models.kernel_tables.tables import KernelTables
from latency_models.models import Model, load_model
from schedulers.batches import Batch
from workloads.errors import BadInput


class KernelTableStepTime:
    """Linear layers by rows, attention by context, LM head and sampler by sequences, experts, collectives, overhead.

    The head sees one row of every sequence in the step, also of prompts that are not done yet: vLLM computes their
    logits too, and drops the token.

    Kernel times were summed, so the tables leave out the moments between kernels and between steps, for which there
    are settings; and, for which there are none, a clock that falls under sustained load, and kernels that a compiled
    engine fuses or picks otherwise than the eager one that was measured.

    Attributes:
        tables, settings, model: what it was made from.
        outside_: axes (`attention.kv_decode`, `dense.tokens`, ...) on which a step lay beyond what was measured, so
            that its time is an extrapolation, with the farthest value asked for. Empty while predictions are covered.

    Raises:
        BadInput: tables of another degree of tensor parallelism, or without what the model needs.
    """

    def __init__(self, tables: KernelTables, settings: KernelTableSettings, model: Model) -> None:
        if tables.tensor_parallel != settings.tensor_parallel:
            expected = f"expected {tables.tensor_parallel}, for which the tables were measured"
            raise BadInput(
                expected, field="tensor_parallel", value=settings.tensor_parallel, file=tables.provenance.source
            )
        self.tables, self.settings, self.model = tables, settings, model
        self.outside_: dict[str, float] = {}
        scale = model.layers * 1e-6 * settings.time_scale
        self._attention = AttentionTimes(tables.attention, tables.skew, scale, self._flag)
        self._rows = linear_layers(tables, settings, model, self._flag)
        self._head = head(tables, settings, model, self._flag)
        self._experts = ExpertTimes(tables, settings, model, self._flag) if moe_layers(model) else None
        self._overhead = settings.overhead + settings.kernel_gap * kernels_a_step(tables, model)
        self._peers = settings.data_parallel

    def seconds(self, batch: Batch) -> float:
        """Duration of one step, seconds; ranks that share the experts are taken to have as many rows each."""
        return self.rank_seconds(batch, batch.tokens * self._peers)

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        """As `StepTime.decode_seconds`."""
        return self.rank_decode_seconds(decodes, kv, longest, decodes * self._peers, steps)

    def rank_seconds(self, batch: Batch | None, gathered: int) -> float:
        """As `GroupStepTime.rank_seconds`. An idle rank lends its experts, and runs a row of its own to keep step."""
        if batch is None:
            return self._rest(1, 0, gathered) if self._experts is not None else 0.0
        chunks = batch.chunks
        rest = self._rest(batch.n_decodes + batch.prefill_tokens, batch.n_decodes + len(chunks), gathered)
        if chunks:
            return rest + self._attention.mixed(batch)
        return rest + self._attention.decode(batch.n_decodes, batch.decode_kv, batch.longest_decode)

    def rank_decode_seconds(self, decodes: int, kv: int, longest: int, gathered: int, steps: int) -> list[float]:
        """As `GroupStepTime.rank_decode_seconds`."""
        if not decodes:
            return [self.rank_seconds(None, gathered)] * steps
        rest, attention = self._rest(decodes, decodes, gathered), self._attention.decode
        return [rest + attention(decodes, kv + decodes * i, longest + i) for i in range(steps)]

    def _rest(self, rows: int, sequences: int, gathered: int) -> float:
        """Seconds of all but attention."""
        seconds = self._overhead + self._rows.at(rows) + self._head.at(sequences)
        return seconds if self._experts is None else seconds + self._experts.at(gathered)

    def _flag(self, axis: str, value: float) -> None:
        if value > self.outside_.get(axis, 0.0):
            self.outside_[axis] = float(value)


def load_kernel_tables(
    path: Path, settings: KernelTableSettings, model: Model | None = None, base: Path = Path()
) -> KernelTableStepTime:
    """The step times of a folder of tables, or of the file that was made of one; relative paths start from `base`.

    Args:
        model: in place of the one that the settings name.

    Raises:
        BadInput: a file that cannot be read or breaks its format, an unknown model, or tables that do not fit.
    """
    tables = read_kernel_tables(base / path)
    return KernelTableStepTime(tables, settings, model or load_model(settings.model, base))
