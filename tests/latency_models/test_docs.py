"""The reference of calibration files has every field and default, and that of scenarios every source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from latency_models.calibration import Calibration, FitReport, Line, Provenance
from latency_models.deployment.expert_load import ExpertLoad
from latency_models.deployment.hardware import Efficiency, Hardware, Network
from latency_models.deployment.models import (
    DenseFFN,
    ExpertFFN,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    Model,
)
from latency_models.deployment.roofline import Deployment, Overhead
from latency_models.sources.registry import built_in_sources

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_reference_of_scenarios_names_every_source() -> None:
    page = (DOCS / "reference" / "serving-scenario.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `step_time.source` \|.*", page, re.MULTILINE)
    assert {name for name in re.findall(r"`(\w+)`", row)} == built_in_sources().keys()


SECTIONS: dict[str, type[BaseModel]] = {
    "### The file": Calibration,
    "### A line": Line,
    "### `fit`": FitReport,
    "### `provenance`": Provenance,
    "## The hardware file": Hardware,
    "### `network`": Network,
    "### `efficiency`": Efficiency,
    "## The model file": Model,
    "### `attention` with `kind: gqa`": GroupedQueryAttention,
    "### `attention` with `kind: mla`": LatentAttention,
    "### `linear_attention`": LinearAttention,
    "### `ffn` with `kind: dense`": DenseFFN,
    "### `ffn` with `kind: moe`": ExpertFFN,
    "## The deployment": Deployment,
    "### `overhead`": Overhead,
    "### `expert_load`": ExpertLoad,
}


def reference() -> dict[str, str]:
    """The reference page by its headings."""
    text = (DOCS / "reference" / "calibration-file.md").read_text(encoding="utf-8")
    headings = re.findall(r"^##.*$", text, re.MULTILINE)
    return dict(zip(headings, re.split(r"^##.*$", text, flags=re.MULTILINE)[1:], strict=True))


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_reference_lists_every_field(heading: str) -> None:
    rows = re.findall(r"^\| (`.*?) \|", reference()[heading], re.MULTILINE)
    listed = [name.strip(" `") for row in rows for name in row.split(",")]
    expected = [field.alias or name for name, field in SECTIONS[heading].model_fields.items()]
    assert listed == expected


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_reference_tells_each_default_and_what_may_be_left_out(heading: str) -> None:
    fields = {field.alias or name: field for name, field in SECTIONS[heading].model_fields.items()}
    if heading == "## The deployment":
        assert not any(field.is_required() for field in fields.values())
    for row in re.findall(r"^\| `.*", reference()[heading], re.MULTILINE):
        cells = [cell.strip() for cell in row.replace("\\|", "").split("|")[1:-1]]
        for name in (name.strip(" `") for name in cells[0].split(",")):
            default = fields[name].get_default(call_default_factory=True)
            if isinstance(default, bool):
                assert f"default {str(default).lower()}" in cells[2]
            elif isinstance(default, int | float) and not fields[name].is_required():
                message = re.search(r"default (-?[0-9.e-]*[0-9])", cells[2])
                assert (message and float(message[1]) == default) or name == "dense_intermediate_size"
            elif isinstance(default, str) and default:
                assert f"default `{default}`" in cells[2]
            if fields[name].is_required():
                assert "default" not in cells[2]
                assert "optional" not in cells[1]
