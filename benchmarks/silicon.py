"""Measured TTFT and TPOT of closed-loop serving, as aiconfigurator publishes them, and what its clients do.

A client keeps C requests in flight and sends R·C in all. The first C come at once, and their prompts are computed one
after another: in the mean, that wave waits for (N + 1)/2 prompts, its own included, of N requests that the engine
holds. Each later request comes when an answer has ended. That is at the end of a step, and the next one has begun: it
waits for that step, for its own prompt, and for prompts of others that bunch with it, `steady` in all. So, with D and P
of `closed_loop`,

    TTFT = 2·D + (1/R · (N + 1)/2 + (1 − 1/R) · steady)·P      and, while C − N requests wait,      + (C − N)/N · life.

Some clients or engines let one request less run than are in flight (`idle_slots`): the mean wait of a request is then
an answer over N. Files of measured rows seldom say R, and none says how its requests bunch: where they do not, other
rows of the same source tell.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.closed_loop import ClosedLoop
from latency_models.deployment.models import Model
from latency_models.io.files import Columns, builtin_names, read_columns
from latency_models.sources.aiconfigurator.kernels import Placement

_DATED = re.compile(r"source_file=\d{4}-\d\d-\d\d\.csv")
_SUFFIXES = re.compile(r"-(instruct|fp8|fp4|bf16)$")

SAME_SHAPES = {"deepseek-r1": "deepseek-v3"}
"""Models by those that have their shapes."""

RANDOM_RANGE_MEAN = 0.9
"""Mean length in InferenceX, as a share of the stated one: its settings draw lengths uniformly from 0.8 to 1."""


@dataclass(frozen=True, slots=True)
class SiliconRow:
    """One measured point. Times in seconds.

    Attributes:
        model: name of the built-in model file.
        precision: fp8, fp4, or bf16 where the source names none.
        isl, osl: prompt and output tokens of a request, in the mean.
        concurrency: requests in flight, for each attention replica.
        expert_tensor_parallel, expert_parallel: 1 and 1 for a dense model.
        split: calib or dev. tables: name of the folder of kernel tables.
        source: file that the row was taken from. drawn_lengths: lengths are drawn, rather than all equal.
    """

    id: str
    backend: str
    system: str
    model: str
    precision: str
    isl: float
    osl: float
    concurrency: float
    tensor_parallel: int
    expert_tensor_parallel: int
    expert_parallel: int
    ttft: float
    tpot: float
    split: str
    tables: str
    source: str = ""
    drawn_lengths: bool = False

    def placement(self, model: Model) -> Placement:
        """Formats and ranks. Published MoE checkpoints in fp8 scale weights block by block, and keep a 16-bit cache."""
        sparse = model.ffn.kind == "moe"
        fp8 = self.precision == "fp8"
        cache = "fp8" if fp8 and not sparse else "float16"
        return Placement(
            tensor_parallel=self.tensor_parallel,
            expert_tensor_parallel=self.expert_tensor_parallel if sparse else 1,
            expert_parallel=self.expert_parallel if sparse else 1,
            weights=("fp8_block" if sparse else "fp8") if fp8 else "float16",
            cache=cache,
            attention="fp8" if cache == "fp8" and self.backend == "trtllm" else "float16",
        )


def read_silicon_rows(path: Path, *, known_only: bool = False) -> list[SiliconRow]:
    """The measured points of a CSV file, gzipped or not.

    Rows marked as duplicates are left out, and so are those of another mode than `agg`, in which prompts and decodes
    share an engine.

    Args:
        known_only: rows of models that are not known are left out, too, and those in four bits (`fp4`) are kept. Kernel
            tables have no kernels for the latter.
    """
    table = read_columns(path)
    precisions: tuple[str, ...] = ("bf16", "fp8")
    if known_only:
        table, precisions = table.where([name is not None for name in _names(table)]), (*precisions, "fp4")
    stages = table.wholes("pp_size", low=1)
    if max(stages) > 1:
        raise table.fault("expected 1: pipelines are not known here", stages.index(max(stages)), "pp_size")
    aggregated = [mode == "agg" for mode in table.text("mode")]
    aggregated = [keep and twin != "True" for keep, twin in zip(aggregated, table.text("duplicate"), strict=True)]
    shares = [RANDOM_RANGE_MEAN if _DATED.search(text) else 1.0 for text in table.text("silicon_data_source")]
    columns = (
        table.text("id"),
        table.text("backend"),
        table.text("system"),
        _models(table),
        _precisions(table, precisions),
        _scaled(table.wholes("isl", low=1), shares),
        _scaled(table.wholes("osl", low=2), shares),
        table.numbers("batch_size", above=0.0),
        table.wholes("tp_size", low=1),
        [max(ranks, 1) for ranks in table.wholes("moe_tp_size", low=0, blank=1)],
        [max(ranks, 1) for ranks in table.wholes("moe_ep_size", low=0, blank=1)],
        [time * 1e-3 for time in table.numbers("silicon_ttft_ms", above=0.0)],
        [time * 1e-3 for time in table.numbers("silicon_tpot_ms", above=0.0)],
        table.text("split"),
        [name.partition(" ")[0] for name in table.text("kernel_tables")],  # a remark may follow
        [text.partition(";")[0].rpartition("=")[2] for text in table.text("silicon_data_source")],
        [bool(_DATED.search(text)) for text in table.text("silicon_data_source")],
    )
    return [SiliconRow(*row) for row, keep in zip(zip(*columns, strict=True), aggregated, strict=True) if keep]


def _precisions(table: Columns, precisions: tuple[str, ...]) -> list[str]:
    names = [name or "bf16" for name in table.text("precision")]
    for at, name in enumerate(names):
        if name not in precisions:
            raise table.fault(f"expected {', '.join(precisions)} or nothing", at, "precision")
    return names


def _names(table: Columns) -> list[str | None]:
    """The names of the built-in model files, None for a model that has none."""
    builtin, names = set(builtin_names("models")), []
    for path in table.text("model_path"):
        name = path.rpartition("/")[2].lower()
        while name not in builtin and _SUFFIXES.search(name):
            name = _SUFFIXES.sub("", name)
        name = SAME_SHAPES.get(name, name)
        names.append(name if name in builtin else None)
    return names


def _models(table: Columns) -> list[str]:
    names = []
    for at, name in enumerate(_names(table)):
        if name is None:
            raise table.fault(f"expected one of {', '.join(sorted(builtin_names('models')))}", at, "model_path")
        names.append(name)
    return names


def _scaled(values: list[int], shares: list[float]) -> list[float]:
    return [value * share for value, share in zip(values, shares, strict=True)]


@dataclass(frozen=True, slots=True)
class Protocol:
    """The behaviour of a benchmark's client.

    Attributes:
        rounds: R, requests over those in flight. steady: prompts in the TTFT of a request after the first wave, its own
            included. idle_slots: requests in flight that the engine does not let run.
    """

    rounds: float
    steady: float
    idle_slots: int = 0

    def ttft(self, loop: ClosedLoop, concurrency: float, osl: float) -> float:
        """Mean TTFT, seconds, of all requests."""
        running = max(min(loop.residents, concurrency - self.idle_slots), 1.0)
        prompts = (running + 1) / 2 / self.rounds + (1 - 1 / self.rounds) * min(self.steady, running)
        alone_seconds = 2 * loop.decode_step + prompts * loop.prompt
        return alone_seconds + (concurrency - running) / running * (alone_seconds + (osl - 1) * loop.tpot)


POSSIBLE = tuple(itertools.starmap(Protocol, itertools.product((5.0, 7.0, 10.0), (1.0, 1.5, 2.0, 2.5), (0, 1))))
"""The protocols that a source without a description may have."""

INFERENCEX = tuple(rule for rule in POSSIBLE if rule.rounds == 10 and not rule.idle_slots)
"""Those of InferenceX, whose settings say that ten times as many prompts are sent as are in flight."""


@dataclass(frozen=True, slots=True)
class KnownProtocol:
    """The protocol of a source, and the half width of 90 % of its rows' errors, of logarithms."""

    protocol: Protocol
    half: float


def choose_protocol(rows: Sequence[SiliconRow], loops: Sequence[ClosedLoop]) -> KnownProtocol:
    """The possible protocol of one source with the smallest median error."""
    possible = INFERENCEX if rows[0].drawn_lengths else POSSIBLE
    errors = {protocol: np.abs(_errors(protocol, rows, loops)) for protocol in possible}
    best = min(possible, key=lambda protocol: float(np.median(errors[protocol])))
    return KnownProtocol(best, float(np.quantile(errors[best], 0.9)))


def _errors(protocol: Protocol, rows: Sequence[SiliconRow], loops: Sequence[ClosedLoop]) -> np.ndarray:
    predicted = [protocol.ttft(loop, row.concurrency, row.osl) for row, loop in zip(rows, loops, strict=True)]
    errors: np.ndarray = np.log(np.array(predicted) / np.array([row.ttft for row in rows]))
    return errors
