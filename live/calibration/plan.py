"""The plan of a calibration, its device, and the measurements so far, on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import TypeAdapter

from latency_models.deployment.hugging_face import model_from_config, read_config
from latency_models.deployment.models import Model
from live.calibration.operations import HEAD, QUANTISED, ROW_BY_ROW, Point, missing, shape_of
from live.device import DEFAULT_DTYPE, device_name, versions
from workloads.errors import BadInput

GROUPS = ("layers", "attention", "head", "quantised", "communication", "overhead")
"""The choices of `--ops`."""

DEFAULT_GROUPS = tuple(group for group in GROUPS if group != "communication")

MORE_ROUNDS = 4
"""Maximum number of further rounds of points that have not settled."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SERIES: tuple[tuple[str, Sequence[str], str, Sequence[str]], ...] = (
    ("layers", ROW_BY_ROW, "tokens", ("tokens",)),
    ("attention", ("decode_attention",), "decodes", ("batch", "context")),
    ("attention", ("prefill_attention",), "prompts", ("chunk", "before")),
    ("attention", ("mixed_attention",), "mixed", ("chunk", "before", "batch", "context")),
    ("head", HEAD, "sequences", ("sequences",)),
    ("quantised", QUANTISED, "quantised", ("tokens",)),
    ("communication", ("round_trip",), "requests", ("requests",)),
)
"""The group of operations, their names, the field of `Grid` with their sizes, and the axes of these."""


@dataclass(frozen=True)
class Grid:
    """The sizes of a calibration, and held-out points of the same kinds.

    `decodes`: (batch sizes, contexts). `prompts`: (chunks, cached tokens before them); `mixed`: with decodes. `steps`:
    (prompt tokens, decodes, context). `budget`: seconds of a point in a round. `statistic` of its rounds: the `median`,
    or the `least` on a shared machine, where other programs can only lengthen a round.
    """

    tokens: Sequence[int]
    held_tokens: Sequence[int]
    decodes: tuple[Sequence[int], Sequence[int]]
    held_decodes: Sequence[tuple[int, int]]
    prompts: tuple[Sequence[int], Sequence[int]]
    held_prompts: Sequence[tuple[int, int]]
    mixed: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
    held_mixed: Sequence[tuple[int, int, int, int]]
    sequences: Sequence[int]
    held_sequences: Sequence[int]
    quantised: Sequence[int]
    held_quantised: Sequence[int]
    requests: Sequence[int]
    held_requests: Sequence[int]
    steps: Sequence[tuple[int, int, int]]
    rounds: int
    budget: float
    statistic: Literal["median", "least"]

    def points(self, groups: Sequence[str]) -> list[Point]:
        points = []
        for group, names, field, axes in SERIES:
            measured, held_out = getattr(self, field), getattr(self, f"held_{field}")
            if len(axes) == 1:
                measured, held_out = [measured], [(size,) for size in held_out]
            for name in names if group in groups else ():
                points += [Point(name, tuple(zip(axes, sizes, strict=True))) for sizes in product(*measured)]
                points += [Point(name, tuple(zip(axes, sizes, strict=True)), held_out=True) for sizes in held_out]
        return points


def read_grid(name: str) -> Grid:
    """The grid of a device (`cpu`, `cuda`), the most important points (`coarse`), or few of them (`quick`)."""
    document = yaml.safe_load((Path(__file__).parent / "grids.yaml").read_text(encoding="utf-8"))
    return TypeAdapter(Grid).validate_python(document[name])


@dataclass(frozen=True)
class Plan:
    """The model, the points and the device of a calibration. `groups`: the selected ones of `GROUPS`."""

    model: Model
    device: str
    dtype: str
    grid: Grid
    groups: Sequence[str]
    epsilon: float = 1e-5
    quick: bool = False

    def points(self) -> tuple[list[Point], dict[str, str]]:
        """The points that can be measured, and by name the operations that cannot, each with the reason."""
        shape = shape_of(self.model)
        everything = self.grid.points([group for group in self.groups if group != "communication"])
        names = dict.fromkeys(point.operation for point in everything)
        skipped = {name: why for name in names if (why := missing(name, shape))}
        for group, note in (("communication", "only with --ops communication"), ("overhead", "left out by --ops")):
            if group not in self.groups:
                skipped[group] = note
        points = [point for point in everything if point.operation not in skipped]
        if "overhead" in self.groups:
            axes = ("chunk", "decodes", "context")
            points += [Point("whole_step", tuple(zip(axes, sizes, strict=True)), True) for sizes in self.grid.steps]
        return points, skipped

    def messages(self) -> list[Point]:
        """The points of messages between two processes; none unless selected."""
        return self.grid.points(["communication"]) if "communication" in self.groups else []

    def count(self) -> int:
        """The minimum number of measurements of a run."""
        return self.grid.rounds * (len(self.points()[0]) + len(self.messages()))

    def about(self) -> dict[str, Any]:
        """The description that two runs must share for one to continue the other."""
        description = {
            "schema": "twin.calibration-journal/1",
            "device": device_name(self.device),
            "model": self.model.model_dump(mode="json", by_alias=True),
            "dtype": self.dtype,
            "grid": dataclasses.asdict(self.grid),
            "versions": versions(),
        }
        about: dict[str, Any] = json.loads(json.dumps(description))
        return about


def make_plan(
    config: Path,
    device: str,
    dtype: str | None = None,
    groups: Sequence[str] | None = None,
    *,
    coarse: bool = False,
    quick: bool = False,
) -> Plan:
    """The plan of a calibration: the points to measure, and the device."""
    if device not in DEFAULT_DTYPE:
        raise BadInput("expected cpu or cuda", field="--device", value=device)
    device_name(device)
    dtype = dtype or DEFAULT_DTYPE[device]
    for field, value, choices in [
        ("--dtype", dtype, tuple(DTYPES)),
        *(("--ops", name, GROUPS) for name in groups or ()),
    ]:
        if value not in choices:
            raise BadInput(f"expected one of {', '.join(choices)}", field=field, value=value)
    grid = read_grid("quick" if quick else "coarse" if coarse else device)
    epsilon = read_config(config).number("rms_norm_eps", 1e-6)
    return Plan(model_from_config(config), device, dtype, grid, tuple(groups or DEFAULT_GROUPS), epsilon, quick)


class Journal:
    """Lines of JSON beside the calibration: first what is measured, on what, then a line for each measurement.

    The same command continues a run that was killed. A line that a kill cut short is dropped. A journal of something
    else is replaced.
    """

    def __init__(self, path: Path, about: dict[str, Any], *, fresh: bool = False) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}
        lines = [] if fresh else list(_lines(path))
        if lines and lines[0] == about:
            self.entries = {line["key"]: line for line in lines[1:] if "key" in line}
        text = [about, *self.entries.values()]
        path.write_text("".join(json.dumps(line) + "\n" for line in text), encoding="utf-8")

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self.entries[key]

    def add(self, key: str, **values: Any) -> None:
        """Record one measurement; it is on disk when this returns."""
        entry = {"key": key, **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self.entries[key] = entry

    def rounds(self, point: Point, before: int) -> list[float]:
        """Seconds of a point in the rounds before round `before` that measured it."""
        keys = [f"{number} {point.key}" for number in range(before)]
        return [self.entries[key]["seconds"] for key in keys if key in self.entries]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            return
        if not isinstance(value, dict):
            return
        yield value
