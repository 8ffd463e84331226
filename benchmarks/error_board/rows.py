"""Measured serving rows, as `systems/silicon_sample.csv` of aiconfigurator-core has them.

A row is the mean TTFT and TPOT of a client that keeps a number of requests in flight. The file was put together from
several sources, whose columns mean different things, and one measurement is often there two or three times:

- Where `attention_dp_size` is stated, and experts are split both ways (`moe_tp_size` 8, `moe_ep_size` 8), `tp_size` or
  `attention_dp_size` is their product: such an engine has 8 devices, not 64, and its experts are spread whole. The same
  measurements under another source say so. So do those of vLLM with `moe_ep_size` 16 on four devices.
- Without `attention_dp_size`, `batch_size` counts the requests of one attention replica, and there are as many replicas
  as ranks of experts for each rank of `tp_size`.
- Aggregated rows of 12 to 72 devices add up the devices of prefill and decode workers: how many each has is not known.
- Few disaggregated rows state their workers. Others are the same measurements, and take what the former say. Of the
  rest, most have a number in flight that InferenceX's public configurations (`configs/nvidia-master.yaml`, all versions
  to May 2026) give to one deployment of engines of these sizes (`deployments.csv`), with or without multi-token
  prediction, or both. What is left is assumed to be deployed like the measurement of the same engine, GPU and lengths
  with the next number in flight, of those whose decode workers share the requests evenly.
- No other row says whether multi-token prediction was on. On TensorRT-LLM 1.2.0rc6.post3 it was: InferenceX ran that
  release with it alone, and rc6.post2 without, which is 1.6 times as slow. Of 1.1.0rc2.post2 it ran both.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.silicon import RANDOM_RANGE_MEAN
from latency_models.io.files import Columns, read_columns

SAMPLE = Path("systems") / "silicon_sample.csv"

IN_FLIGHT = re.compile(r"silicon_concurrency=(\d+)")
DRAWN = re.compile(r"db-dump|source_file=(\d{4}-|[^/]*gap-analysis\.csv)")
"""Sources whose clients draw lengths from 0.8 to 1 of the stated ones, as InferenceX has them."""

LARGEST_ENGINE = 8
"""Devices of an aggregated engine; in this file more are the sum of several workers."""

FORMATS = re.compile(r"-(instruct|fp8|nvfp4)$")

SHAPES = {"deepseek-r1": "deepseek-v3", "deepseek-v3.1": "deepseek-v3", "kimi-k2.5": "kimi-k2"}
"""Models by those that have their shapes."""

SUMMED = "the devices of prefill and decode workers are added up, and their split is not stated"
ASSUMED = "workers assumed: those of the nearest row that states them"
DRAFTS = "multi-token prediction, whose acceptance is not stated"
PERHAPS_DRAFTS = "multi-token prediction or none: both were measured"

DEPLOYMENTS = Path(__file__).with_name("deployments.csv")


@dataclass(frozen=True, slots=True)
class Workers:
    """Equal engines, `count` of them, each with ranks and replicas of attention, and experts spread whole or not."""

    tensor_parallel: int
    data_parallel: int = 1
    expert_parallel: bool = False
    count: int = 1

    @property
    def devices(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel * self.data_parallel

    @classmethod
    def read(cls, text: str) -> Workers:
        """The workers of a text that `str` has written."""
        match = re.fullmatch(r"(?:(\d+)x )?(tp|dp)(\d+)( ep)?", text)
        assert match is not None, text
        count, kind, ranks, spread = match.groups()
        width, replicas = (1, int(ranks)) if kind == "dp" else (int(ranks), 1)
        return cls(width, replicas, bool(spread), int(count or 1))

    def __str__(self) -> str:
        """TP and DP, with EP where experts are spread: `4x tp8`, `dp8 ep`."""
        ranks = [f"tp{self.tensor_parallel}"] if self.tensor_parallel > 1 or self.data_parallel == 1 else []
        ranks += [f"dp{self.data_parallel}"] if self.data_parallel > 1 else []
        ranks += ["ep"] if self.expert_parallel else []
        return (f"{self.count}x " if self.count > 1 else "") + " ".join(ranks)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured row. Times in seconds.

    Attributes:
        engine, version: of the engine; version "" where the row states none.
        precision: bf16, fp8, fp4 or int4.
        isl, osl: tokens of a request in the mean. drawn: they are drawn, rather than equal.
        in_flight: requests of the client.
        decode: the engines that decode; in an aggregated row they prefill, too. prefill: None in an aggregated row.
        refusal: why the row cannot be predicted, "" if it can. assumption: what it does not state.
    """

    id: str
    engine: str
    version: str
    system: str
    model: str
    precision: str
    isl: float
    osl: float
    drawn: bool
    in_flight: float
    decode: Workers
    prefill: Workers | None
    ttft: float
    tpot: float
    refusal: str = ""
    assumption: str = ""

    @property
    def measurement(self) -> tuple[str | float, ...]:
        """Equal for rows of one measurement."""
        return (self.engine, self.system, self.model, self.isl, self.osl, round(self.ttft, 9), round(self.tpot, 9))

    @property
    def sizes(self) -> str:
        """Devices of a prefill and of a decode engine, which a row states even if the rest of its layout is assumed."""
        return f"{self.prefill.devices} + {self.decode.devices}" if self.prefill else str(self.decode.devices)

    @property
    def layout(self) -> str:
        """The layout in words."""
        return f"{self.prefill} + {self.decode}" if self.prefill else str(self.decode)


def read_rows(package: Path) -> list[Row]:
    """All rows of an installed `aiconfigurator_core` folder, in the order of the file."""
    path = package / SAMPLE
    table = read_columns(path)
    rows = [_row(table, at) for at in range(len(table))]
    return _with_workers(_same_layouts(rows))


def _row(table: Columns, at: int) -> Row:
    text = {name: table.text(name)[at] for name in table.names}
    source = text["silicon_data_source"]
    shared = text["mode"] == "agg"
    drawn = bool(DRAWN.match(source))
    scale = RANDOM_RANGE_MEAN if drawn else 1.0
    prefill = None
    refusal = ""
    if shared:
        decode, in_flight, refusal = _aggregated(text)
    else:
        prefill, decode = _workers(text, "prefill_"), _workers(text, "decode_")
        in_flight = _in_flight(text) or _number(text["decode_batch_size"]) * decode.count * decode.data_parallel
        if prefill.devices == decode.devices and prefill.devices > 8 and prefill.devices & (prefill.devices - 1):
            refusal = SUMMED
    return Row(
        id=text["id"],
        engine=text["backend"],
        version=text["backend_version"],
        system=text["system"],
        model=_model(text["model_path"]),
        precision=text["precision"] or "bf16",
        isl=_number(text["isl"]) * scale,
        osl=_number(text["osl"]) * scale,
        drawn=drawn,
        in_flight=in_flight,
        decode=decode,
        prefill=prefill,
        ttft=_number(text["silicon_ttft_ms"]) * 1e-3,
        tpot=_number(text["silicon_tpot_ms"]) * 1e-3,
        refusal=refusal,
    )


def _model(path: str) -> str:
    """The model file that a row's model has, or would have: without formats, and by its shapes."""
    name = path.rpartition("/")[2].lower()
    while FORMATS.search(name):
        name = FORMATS.sub("", name)
    return SHAPES.get(name, name)


def _number(text: str) -> float:
    return float(text) if text else 0.0


def _whole(text: str) -> int:
    return max(int(_number(text)), 1)


def _in_flight(text: dict[str, str]) -> float:
    match = IN_FLIGHT.search(text["silicon_data_source"])
    return float(match[1]) if match else 0.0


def _aggregated(text: dict[str, str]) -> tuple[Workers, float, str]:
    """The engine of an aggregated row, the requests in flight, and why it is not known."""
    width, split, spread = (_whole(text[name]) for name in ("tp_size", "moe_tp_size", "moe_ep_size"))
    stated = text["attention_dp_size"]
    replicas = _whole(stated)
    in_flight = _in_flight(text) or _number(text["batch_size"])
    if not stated:
        replicas = max(split * spread // width, 1)
        return Workers(width, replicas, spread > 1), _number(text["batch_size"]) * replicas, ""
    if split > 1 and spread > 1:
        return (Workers(1, spread, True) if replicas > 1 else Workers(spread, 1, True)), in_flight, ""
    if replicas > 1 and width > 1:
        return Workers(1, width, True), in_flight, ""
    return Workers(width, replicas, spread > 1), in_flight, SUMMED if width > LARGEST_ENGINE else ""


def _workers(text: dict[str, str], stage: str) -> Workers:
    width, spread, replicas = (_whole(text[stage + name]) for name in ("tp_size", "moe_ep_size", "attention_dp_size"))
    count = int(_number(text[stage + "num_workers"]))
    return Workers(width, replicas, spread > 1, count)


def _same_layouts(rows: Sequence[Row]) -> list[Row]:
    """Rows of one measurement with the workers that one of them states, and with one number in flight."""
    stated: dict[tuple[str | float, ...], Row] = {}
    for row in rows:
        if row.decode.count and not row.refusal:
            stated.setdefault(row.measurement, row)
    same = []
    for row in rows:
        known = stated.get(row.measurement)
        if known is not None and (known.prefill is None) == (row.prefill is None):
            row = replace(row, decode=known.decode, prefill=known.prefill, refusal="")
        same.append(row)
    return same


def _with_workers(rows: Sequence[Row]) -> list[Row]:
    """Disaggregated rows without a number of workers, deployed like the nearest row with one."""
    rows = [_as_deployed(row) if row.prefill and not row.decode.count else row for row in rows]
    known: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.prefill and row.decode.count and not row.assumption:
            for key in _keys(row):
                known[key].append(row)
    complete = []
    for row in rows:
        if row.prefill and not row.decode.count and not row.refusal:
            row = _like_nearest(row, next((known[key] for key in _keys(row) if key in known), []))
        complete.append(row)
    return complete


@cache
def _deployments() -> dict[tuple[object, ...], set[tuple[str, str, bool]]]:
    """Prefill and decode workers, and whether they draft, by what a row states."""
    table = read_columns(DEPLOYMENTS)
    names = ("engine", "version", "model", "system", "precision", "prefill", "decode", "mtp", "in_flight")
    isl, osl = (table.wholes(name, low=1) for name in ("isl", "osl"))
    deployments: dict[tuple[object, ...], set[tuple[str, str, bool]]] = defaultdict(set)
    for at, (*stated, prefill, decode, mtp, in_flight) in enumerate(zip(*map(table.text, names), strict=True)):
        engine, version, *served = stated
        sizes = Workers.read(prefill).devices, Workers.read(decode).devices
        for requests in map(int, in_flight.split()):
            for release in ("", version):
                key = engine, release, *served, isl[at], osl[at], requests, *sizes
                deployments[key].add((prefill, decode, mtp == "yes"))
    return deployments


def _as_deployed(row: Row) -> Row:
    """A row with the workers that the public configurations state, where these are the only ones."""
    assert row.prefill is not None
    lengths = (round(length / RANDOM_RANGE_MEAN) for length in (row.isl, row.osl))
    stated = row.engine, row.version, row.model, row.system, row.precision
    public = _deployments().get((*stated, *lengths, row.in_flight, row.prefill.devices, row.decode.devices), set())
    if len({(prefill, decode) for prefill, decode, _ in public}) != 1:
        return row
    prefill, decode, _ = next(iter(public))
    drafts = {mtp for _, _, mtp in public}
    assumption = PERHAPS_DRAFTS if len(drafts) > 1 else DRAFTS if drafts == {True} else ""
    return replace(row, prefill=Workers.read(prefill), decode=Workers.read(decode), assumption=assumption)


def _keys(row: Row) -> Iterable[tuple[object, ...]]:
    """Keys that rows deployed alike share, from the most detailed on."""
    assert row.prefill is not None
    lengths = row.isl > 2 * row.osl
    devices = row.prefill.devices, row.decode.devices
    yield row.engine, row.system, row.precision, row.model, lengths, devices
    yield row.engine, row.system, row.precision, row.model, lengths, row.decode.devices
    yield row.engine, row.system, row.precision, lengths, row.decode.devices
    yield row.engine, row.system, lengths
    yield row.engine, lengths
    yield (lengths,)


def _like_nearest(row: Row, stated: Sequence[Row]) -> Row:
    if not stated:
        return replace(row, refusal="no number of workers stated, and no row like it that states one")
    assert row.prefill is not None

    def distance(other: Row) -> tuple[bool, float]:
        """Requests in flight are mostly a multiple of the decode workers."""
        return row.in_flight % other.decode.count > 0, abs(math.log(other.in_flight / row.in_flight))

    like = min(stated, key=distance)
    assert like.prefill is not None
    return replace(row, decode=like.decode, prefill=like.prefill, assumption=f"{ASSUMED} (of {row.layout})")
