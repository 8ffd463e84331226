"""The files that come with the package: calibrations, hardware and models, found by name."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

from workloads.errors import BadInput

Kind = Literal["calibrations", "hardware", "models"]
FOLDER = Path(__file__).parent / "data"


def builtin_names(kind: Kind) -> list[str]:
    """Names of the built-in files of one kind, sorted."""
    return sorted(path.stem for path in (FOLDER / kind).glob("*.yaml"))


def find_data(kind: Kind, name: str | Path, base: Path = Path()) -> Path:
    """The file behind a built-in name or a path.

    Text without a slash and without the ending of a YAML file is a name; everything else, and every `Path`, is a path.
    Relative paths start from `base`.

    Raises:
        BadInput: the name is not built in.
    """
    if isinstance(name, Path) or "/" in name or name.endswith((".yaml", ".yml")):
        return base / name
    names = builtin_names(kind)
    if name in names:
        return FOLDER / kind / f"{name}.yaml"
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise BadInput(f"expected a path or one of {', '.join(names)}{hint}", field=kind.removesuffix("s"), value=name)
