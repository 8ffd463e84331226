"""Fields that name a file: in a scenario they start from its folder, on the command line from the current one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from latency_models.io.builtin_files import is_path


class CommandLineText(str):
    """Text that was given on the command line. The fields below tell it from text in a file."""


def from_command_line(value: Any) -> Any:
    """`value` with every text in it marked as given on the command line, also inside lists and mappings."""
    if isinstance(value, str):
        return CommandLineText(value)
    if isinstance(value, list):
        return [from_command_line(each) for each in value]
    if isinstance(value, dict):
        return {key: from_command_line(each) for key, each in value.items()}
    return value


def _absolute(value: Any) -> Any:
    return str(Path(value).absolute()) if isinstance(value, CommandLineText) else value


def _absolute_file(value: Any) -> Any:
    return _absolute(value) if isinstance(value, CommandLineText) and is_path(value) else value


FilePath = Annotated[str, BeforeValidator(_absolute)]
"""The path of a file or folder."""

NAME_OR_FILE = BeforeValidator(_absolute_file)
"""Marks a field that may hold a built-in name or the path of a file (see `find_data`), beside other types."""

NameOrFile = Annotated[str, NAME_OR_FILE]
"""A built-in name, or the path of a file."""
