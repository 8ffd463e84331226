"""The duration of one engine step: the base class of the models that a simulator calls, their origin and unknowns.

A model names its unknowns. Each of them has a score, a standard normal number of which 0 stands for the estimate; the
model says what a score does to its step times. Unknowns of one name are one unknown: two pools of one GPU that both
have an `overhead` get the same score.

A model gives the same durations, bit for bit, for single batches and for runs of decode steps between which no
sequence joins or leaves, so that a simulation can skip over such runs.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from latency_models.stages import split
from schedulers.batches import Batch, Chunk, DraftedSteps, MixedBatch
from schedulers.parallel_cores import GroupBatch
from schedulers.sequence import Sequence as EngineSequence
from workloads.errors import BadInput
from workloads.request import Request

if TYPE_CHECKING:
    import numpy as np

    from latency_models.deployment.models import Model


Basis: TypeAlias = Literal["fitted", "held out", "stated", "assumed", "extrapolated"]
"""The origin of a deviation: the covariance of a fit, errors at points that were left out, the user, a prior for what
was not measured, a prior for batches beyond the measurements."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """One thing that a step-time model does not know exactly.

    `name`: short, with a part after a dot (`fit.2`). `about`: a phrase for tables. `basis`: where the deviation comes
    from. `deviation`: of the factor's logarithm at a score of 1; None for no factor. `measure`: in order to know more.
    """

    name: str
    about: str
    basis: Basis
    deviation: float | None = None
    measure: str = ""

    @property
    def group(self) -> str:
        """The name before the dot: parts of one group are judged together."""
        return self.name.partition(".")[0]

    def factor(self, score: float) -> float:
        """The factor of a score: exp(deviation · score), so that 2 and 1/2 are equally far from 1."""
        assert self.deviation is not None
        return math.exp(self.deviation * score)


def draw_scores(unknowns: Iterable[Unknown], rng: np.random.Generator) -> dict[str, float]:
    """A score for each unknown, by name. It depends on the generator's state and the name, not on other unknowns."""
    from numpy.random import default_rng  # slow to import, and only draws need it

    key = int(rng.integers(2**63))
    return {
        unknown.name: float(default_rng([key, zlib.crc32(unknown.name.encode())]).standard_normal())
        for unknown in unknowns
    }


FLAGS = {"gpu": "--gpu", "engine": "--engine", "engine_version": "--engine-version", "model": "--model"}
"""Flags of `twin calibrate import` for fields that the source does not state."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The device, engine and model that were measured, and ranks that share a layer. "" or None: not known."""

    gpu: str = ""
    engine: str = ""
    engine_version: str = ""
    model: str = ""
    tensor_parallel: int | None = None

    def completed(self, stated: Origin) -> Origin:
        """This origin, with unknown fields from `stated`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in asdict(stated).items():
            if values[name] and value and plain_name(str(values[name])) != plain_name(str(value)):
                flag = "--" + name.replace("_", "-")
                raise BadInput(f"expected {values[name]}, as the tables say", field=flag, value=value)
            values[name] = values[name] or value
        return replace(self, **values)

    @property
    def unknown(self) -> list[str]:
        """Notes on unknown fields, each with the flag that sets it."""
        return [
            f"the tables do not say their {name.replace('_', ' ')}; {flag} records it"
            for name, flag in FLAGS.items()
            if not getattr(self, name)
        ]

    def document(self) -> dict[str, Any]:
        """The fields that are known, as plain values: arguments of an equal origin."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class MeasuredDeployment:
    """The deployment that step times are for; None where a field is not known.

    `model`: None where times are sums over its layers already. `notes`: on how the timings were completed. `measured`:
    False for computed times, of which `origin` says nothing. `memory`, `weights`: bytes of one device.
    """

    origin: Origin
    model: Model | None = None
    ranks: int | None = None
    notes: tuple[str, ...] = ()
    measured: bool = True
    device: str = ""
    devices: int | None = None
    memory: float | None = None
    weights: float | None = None


def plain_name(text: str) -> str:
    """A name without its owner, case and punctuation: meta-llama/Llama-3.1-8B is llama318b."""
    return "".join(character for character in text.rsplit("/", 1)[-1].lower() if character.isalnum())


def same_model(first: str, second: str) -> bool:
    """True if two names may be of one model: one is the other with a word more (Llama-2-70b-hf), or empty."""
    first, second = plain_name(first), plain_name(second)
    return first.startswith(second) or second.startswith(first)


ChunkTable: TypeAlias = tuple[list[int], list[float]]
"""Token counts, rising, and the seconds of a pass over each."""


ANY_SEQUENCE = EngineSequence(Request(0, 0.0, 1, 1), 0, one_shot=False)
"""Stands for a sequence in batches of which only the numbers matter."""


class StepTime(ABC):
    """Step times of an engine, seconds. A subclass implements `seconds` and `decode_seconds`.

    The defaults describe a model whose error is not known, and whose ranks share nothing; one that knows its error
    implements `unknowns` and `vary`.
    """

    @abstractmethod
    def seconds(self, batch: Batch) -> float:
        """Duration of one step."""

    @abstractmethod
    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        """Durations of `steps` successive decode steps of the same sequences; equal to `seconds` of each.

        `kv`: cached tokens that the first step attends to, growing by `decodes` a step; `longest`: by 1.
        """

    def drafted_seconds(self, steps: DraftedSteps) -> list[float]:
        """Durations of steps that verify drafts of the same decodes; equal to `seconds` of each."""
        return [self.seconds(batch) for batch in steps.batches()]

    def adapter_seconds(self, decodes: Iterable[EngineSequence]) -> float:
        """Seconds that LoRA adapters of these decodes add to each value of `decode_seconds`."""
        return 0.0

    def rank_seconds(self, batch: Batch | None, gathered: int) -> float:
        """Seconds of one data-parallel rank's step (None: idle); `gathered`: rows of all, which spread experts see."""
        return 0.0 if batch is None else self.seconds(batch)

    def rank_decode_seconds(self, decodes: int, kv: int, longest: int, gathered: int, steps: int) -> list[float]:
        """The values of `rank_seconds` for successive decode steps; 0 decodes mean an idle rank."""
        return self.decode_seconds(decodes, kv, longest, steps) if decodes else [0.0] * steps

    def group_seconds(self, batch: GroupBatch) -> float:
        """Duration of a step that data-parallel ranks take together: the slowest rank's."""
        return max(self.rank_seconds(rank, batch.tokens) for rank in batch.ranks)

    def group_decode_seconds(self, runs: Sequence[tuple[int, int, int]], steps: int) -> list[float]:
        """Seconds of successive decode steps of ranks, by (decodes, kv, longest) of each; equal to `group_seconds`."""
        gathered = sum(decodes for decodes, _, _ in runs)
        ranks = [self.rank_decode_seconds(*run, gathered, steps) for run in runs]
        return [max(durations) for durations in zip(*ranks, strict=True)]

    def stage_seconds(self, batch: Batch, shares: Sequence[float]) -> list[float]:
        """Duration of one step in each pipeline stage, by the shares of the layers; alike layers by default."""
        return split(self.seconds(batch), shares)

    def send_seconds(self, tokens: int) -> float | None:
        """Seconds of the message of `tokens` rows between pipeline stages; None where the source does not know it."""
        return None

    def unknowns(self) -> tuple[Unknown, ...]:
        """Parameters that the model does not know exactly. Empty: its error is unknown, which does not mean 0."""
        return ()

    def vary(self, scores: Mapping[str, float]) -> StepTime:
        """A model at these scores of its unknowns, by name; unknowns that are missing stay at their estimates."""
        return self

    def factors(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The factor of each unknown that has one, by name, at these scores."""
        known = (unknown for unknown in self.unknowns() if unknown.deviation is not None)
        return {unknown.name: unknown.factor(scores.get(unknown.name, 0.0)) for unknown in known}

    @property
    def can_draw(self) -> bool:
        """True if the model has unknowns, so that `draw` gives other models."""
        return bool(self.unknowns())

    def draw(self, rng: np.random.Generator) -> StepTime:
        """A model with all unknowns drawn; the model itself where there are none."""
        unknowns = self.unknowns()
        return self.vary(draw_scores(unknowns, rng)) if unknowns else self

    def outside(self) -> Mapping[str, float]:
        """Axes on which predictions so far lay beyond the measurements, with the largest value on each."""
        return {}

    def mixed_seconds(
        self, num_decodes: int, decode_kv: int, longest_decode: int, context: int, tokens: int, last: bool = False
    ) -> float:
        """Duration of a step of decodes and one chunk of `tokens` behind `context`, which is the prompt's last or not.

        `decode_kv`, `longest_decode`: cached tokens of all decodes and of the longest, their new tokens included.
        """
        chunk = Chunk(ANY_SEQUENCE, tokens, context, last)
        return self.seconds(MixedBatch([chunk], [ANY_SEQUENCE] * num_decodes, decode_kv, longest_decode))

    def chunk_table(self) -> ChunkTable | None:
        """Durations by token count alone, for schedulers that size chunks by an SLO; None where context matters."""
        return None

    def scatter(self) -> float:
        """Relative deviation of single steps about their predictions; 0 where it is not known."""
        return 0.0

    def measured_deployment(self) -> MeasuredDeployment | None:
        """The model and devices that the times were measured for; None where the source does not say."""
        return None

    def kv_tokens(self, gpu_memory_utilization: float, max_num_seqs: int, *, mtp: bool = False) -> float | None:
        """Tokens of the KV cache beside the weights in a share of the memory; 0: none, None: not known.

        Layers with a window keep one for each of `max_num_seqs` sequences. `mtp`: with the model's MTP modules.
        """
        return None


DecodeLine: TypeAlias = Callable[[int], tuple[float, float]]
"""Takes a number of decodes. Returns the seconds of their step without cached tokens, and those of each cached token:
`decode_seconds` of the model is, bit for bit, `fixed + slope * kv`."""


def decode_line(step_time: StepTime) -> DecodeLine | None:
    """The method `decode_line` of a model whose decode steps lie on a line over cached tokens; None without one.

    One that its class inherits does not count, since a subclass may have other step times.
    """
    line: DecodeLine | None = (
        getattr(step_time, "decode_line", None) if "decode_line" in vars(type(step_time)) else None
    )
    return line
