"""The reference is complete and has nothing that is not there: fields, defaults, flags, keys, files."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import cyclopts
import pytest
from pyarrow import parquet
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from latency_models.io.config_io import LateSection
from latency_models.sources.registry import SourceSpec, built_in_sources
from scenarios.afd import AfdScenario
from scenarios.serving import ServingScenario
from schedulers.bundle_slots import REFILL_POLICIES
from schedulers.routing import ROUTERS
from schedulers.scheduling_policies import PREEMPTION_POLICIES, SCHEDULING_POLICIES
from schedulers.step_policies import CHUNK_POLICIES
from tests.docs.pages import REFERENCE, config_fields, names, rows
from twin.cli import program, run
from workloads.traces import TRACE_FORMATS


def models(annotation: Any) -> list[type[BaseModel]]:
    """The models in a type: those of a union too, and all step-time sources."""
    if annotation is SourceSpec:
        return list(built_in_sources().values())
    if isinstance(annotation, type) and issubclass(annotation, LateSection):
        return models(annotation.annotation())
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in models(inner)]


SAME_AS = {
    "engine.speculative_config.draft_step_time",
    "system.decode_step_time",
    "system.lora",
    "system.quantised_step_time",
    "system.swapping",
    "system.pools.step_time",
    "system.pools.engine",
}
"""Sections with the fields of another one, to which their own row refers."""


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted field, type, default) of every field that is no section, in every variant of each section."""
    for name, field in model.model_fields.items():
        dotted = prefix + (field.alias or name)
        inner = [] if dotted in SAME_AS else models(field.annotation)
        for item in inner:
            yield from leaves(item, dotted + ".")
        if not inner or str in get_args(field.annotation):
            yield dotted, field.annotation, field.default


def literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for inner in get_args(annotation) for value in literals(inner)]


FIELDS = {
    "scenario-file.md": list(leaves(AfdScenario)),
    "serving-scenario.md": list(leaves(ServingScenario)),
}


def default_text(default: Any) -> str:
    """A default as the tables write it; None, empty text and required are empty."""
    if default is PydanticUndefined or default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


@pytest.mark.parametrize("page", FIELDS)
def test_a_page_of_scenarios_names_every_field_its_default_and_its_choices_and_no_other_field(page: str) -> None:
    text, documented = (REFERENCE / page).read_text(), [(names(cells[0]), cells[1]) for _, cells in rows(page)]
    fields = {name for name, _, _ in FIELDS[page]}
    assert {name for row, _ in documented for name in row} == fields
    for field in sorted(fields):
        (default_of_page,) = [default for row, default in documented if field in row]
        variants = [(kind, default_text(default)) for name, kind, default in FIELDS[page] if name == field]
        assert default_of_page in {default for _, default in variants}, field
        for value in [value for kind, _ in variants for value in literals(kind)]:
            assert f"`{value}`" in text, (field, value)


@pytest.mark.parametrize(
    ("page", "field", "registry"),
    [
        ("serving-scenario.md", "engine.scheduling_policy", SCHEDULING_POLICIES),
        ("serving-scenario.md", "engine.preemption_policy", PREEMPTION_POLICIES),
        ("serving-scenario.md", "engine.chunking.policy", CHUNK_POLICIES),
        ("serving-scenario.md", "system.routing", ROUTERS),
        ("scenario-file.md", "refill", REFILL_POLICIES),
        ("serving-scenario.md", "workload.trace.format", TRACE_FORMATS),
        ("scenario-file.md", "workload.trace.format", TRACE_FORMATS),
    ],
)
def test_a_field_that_names_a_policy_lists_those_that_ship(page: str, field: str, registry: dict[str, object]) -> None:
    (cells_of_field,) = [cells for _, cells in rows(page) if field in names(cells[0])]
    assert set(registry) <= set(names(cells_of_field[2]))


def commands(command: cyclopts.App, path: str = "") -> Iterator[str]:
    """Every command that runs something, such as `calibrate fit`."""
    for name in sorted(command):
        if not name.startswith("-"):
            inner = command[name]
            if inner.default_command:
                yield f"{path} {name}".strip()
            yield from commands(inner, f"{path} {name}".strip())


COMMANDS = list(commands(program()))


def test_the_command_line_names_every_command_and_no_other() -> None:
    assert "calibrate fit" in COMMANDS
    text = (REFERENCE / "command-line.md").read_text()
    listed = {name.removeprefix("twin ") for _, cells in rows("command-line.md") for name in names(cells[0])}
    assert {name for name in listed if not name.startswith("--")} - set("0123") == set(COMMANDS) - {"serve-live"}
    assert "`twin serve-live --model DIR`" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_help_text(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # a line for each flag
    assert run([*command.split(), "--help"]) == 0
    for line in re.findall(r"^│ (?:\* )? *(-[\w-]+.*?) *│$", capsys.readouterr().out, re.MULTILINE):
        assert re.search(r"\S  +\S", line), f"no help text: {line}"


@pytest.fixture
def folder(workplace: Path) -> Path:
    """The folder of a small run, with the document that it printed beside it as printed.json."""
    small = ["--ratio", "1,2", "--set", "requests_per_instance=300", "--set", "batch_size=16", "--json", "--requests"]
    small += ["--set", "instances.memory=64e9", "--set", "instances.kv_bytes_per_token=70272"]  # so that it is checked
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert run(["sweep", "examples/afd-deepseek-v3.yaml", *small]) == 0, err.getvalue()
    (created,) = (workplace / "runs").iterdir()
    (workplace / "printed.json").write_text(out.getvalue())
    return created


def keys(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(where, key) of every key in a document; items of a list share one. Scenario and settings stand elsewhere."""
    for item in value if isinstance(value, list) else []:
        yield from keys(item, prefix + "[]")
    for key, inner in value.items() if isinstance(value, dict) else []:
        yield prefix, key
        if key not in ("scenario", "settings"):
            yield from keys(inner, f"{prefix}.{key}".lstrip("."))


def test_the_sweep_document_has_every_key_of_a_real_one_and_no_other(folder: Path) -> None:
    document = json.loads((folder.parent.parent / "printed.json").read_text())
    assert all(point["gaps"] for point in document["points"]), "too short for a steady state, so keys are missing"
    here = set(keys({**document, "theory": None, "simulation": None}))
    short = {"calibration", "run", "gap_names"}
    documented = {(heading, name) for heading, cells in rows("sweep-document.md") for name in names(cells[0])}
    assert documented == {(where, key) for where, key in here if where not in short}
    text = (REFERENCE / "sweep-document.md").read_text()
    for where, key in sorted(here):
        if where in short - {"gap_names"}:
            assert f"`{where}.{key}`" in text
    assert document["gap_names"].keys() == document["points"][0]["gaps"].keys()
    assert document["theory"] == document["configurations"][0]["theory"]


def test_the_run_folder_lists_every_file_and_every_key_of_the_manifest(folder: Path) -> None:
    documented = [(heading, name) for heading, cells in rows("run-folder.md") for name in names(cells[0])]
    files = {str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {re.sub(r"\d+-\d+A-\d+F", "<configuration>-<bundle>", name) for name in files}
    assert {name for heading, name in documented if heading == ""} == files
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {name for heading, name in documented if heading == "manifest.json"} == manifest.keys()
    columns = parquet.read_schema(folder / "requests" / "0-1A-1F.parquet").names
    assert {name for heading, name in documented if heading == "requests/"} == set(columns)
    lines = [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]
    points = json.loads((folder / "summary.json").read_text())["points"]
    assert sorted(line.pop("key") for line in lines) == ["0/1", "0/2"]
    assert sorted(lines, key=lambda point: point["ratio"]) == points


def test_fields_of_a_models_config() -> None:
    """The page says which fields are refused, those of windows and of a model's own code among them."""
    from latency_models.deployment.model_config import REFUSED_UNLESS

    conditional = {"use_sliding_window", "sliding_window", "layer_types", "auto_map"}
    assert config_fields()[1] == set(REFUSED_UNLESS) | conditional
