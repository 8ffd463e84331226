"""Reads what lies beside a paper's program: published tables (CSV) and scenarios (YAML)."""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import Any

import yaml


def published(paper: str, name: str) -> list[dict[str, str]]:
    """The rows of a published table, by column."""
    text = (files("papers") / paper / "data" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def scenario(paper: str, name: str = "scenario") -> dict[str, Any]:
    """A scenario document, to be completed or changed by its program."""
    text = (files("papers") / paper / f"{name}.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    return document
