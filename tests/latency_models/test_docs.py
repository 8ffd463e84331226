"""The reference of calibration files has every field and default, and that of scenarios every source."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from latency_models.calibration import Calibration, FitReport, Line, Provenance
from latency_models.deployment.hardware import Deployment, Efficiency, Hardware, Network, Overhead
from latency_models.deployment.layers import ExpertLoad
from latency_models.deployment.models import (
    DenseFFN,
    ExpertFFN,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    Model,
)
from latency_models.sources.registry import built_in_sources
from tests.docs.pages import REFERENCE, items_of, names, rows


def test_the_reference_of_scenarios_names_every_source() -> None:
    (text,) = [text for _, (listed, _, text) in rows("serving-scenario.md") if listed == "`step_time.source`"]
    assert {name for name in names(text) if name.isidentifier()} == built_in_sources().keys()


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


PAGE = (REFERENCE / "calibration-file.md").read_text(encoding="utf-8")


def items(heading: str) -> list[tuple[list[str], str, str]]:
    """(names, type, meaning) of each item below a heading, which must be there once."""
    (section,) = re.findall(rf"^{re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return [(names(listed), note, text) for listed, note, text in items_of(section)]


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_reference_lists_every_field(heading: str) -> None:
    listed = [name for names_of_item, _, _ in items(heading) for name in names_of_item]
    expected = [field.alias or name for name, field in SECTIONS[heading].model_fields.items()]
    assert listed == expected


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_reference_tells_each_default_and_what_may_be_left_out(heading: str) -> None:
    fields = {field.alias or name: field for name, field in SECTIONS[heading].model_fields.items()}
    if heading == "## The deployment":
        assert not any(field.is_required() for field in fields.values())
    for listed, kind, meaning in items(heading):
        for name in listed:
            default = fields[name].get_default(call_default_factory=True)
            if isinstance(default, bool):
                assert f"default {str(default).lower()}" in meaning
            elif isinstance(default, int | float) and not fields[name].is_required():
                message = re.search(r"default (-?[0-9.e-]*[0-9])", meaning)
                assert (message and float(message[1]) == default) or name == "dense_intermediate_size"
            elif isinstance(default, str) and default:
                assert f"default `{default}`" in meaning
            if fields[name].is_required():
                assert "default" not in meaning
                assert "optional" not in kind
