"""Built-in calibrations, hardware, links and models, by name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from workloads.errors import BadInput

Kind = Literal["calibrations", "hardware", "links", "models"]
FOLDER = Path(__file__).parents[1] / "data"


def builtin_names(kind: Kind) -> list[str]:
    """Names of the built-in files of one kind, sorted."""
    return list(_names(kind))


@functools.cache  # they come with the package, and do not change
def _names(kind: Kind) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (FOLDER / kind).glob("*.yaml")))


def is_path(text: str) -> bool:
    """True if text is a path, not a built-in name: it has a slash or the ending of a YAML file."""
    return "/" in text or text.endswith((".yaml", ".yml"))


def find_data(kind: Kind, name: str | Path, base: Path = Path()) -> Path:
    """The path of a built-in file, or of a user's own.

    Text without a slash and without a YAML ending is a built-in name. Any other text, and every `Path`, is a path;
    relative paths start from `base`.

    Raises:
        BadInput: the name is not built in.
    """
    if isinstance(name, Path) or is_path(name):
        return base / name
    names = builtin_names(kind)
    if name in names:
        return FOLDER / kind / f"{name}.yaml"
    import difflib

    close = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise BadInput(f"expected a path or one of {', '.join(names)}{hint}", field=kind.removesuffix("s"), value=name)
