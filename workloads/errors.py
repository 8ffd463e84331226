"""The root of the project's exception tree.

    TwinError
    ├── BadInput          a user's file, field or flag that cannot be used: one line, exit code 2
    └── (each package adds its own below these)

It stands here because `workloads` is the one package that every other may import.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class TwinError(Exception):
    """Any error that this project raises on purpose."""


class BadInput(TwinError, ValueError):
    """A file, a field or a flag that cannot be used: one line with the place, the value, and what was expected."""

    def __init__(
        self,
        expected: str,
        *,
        value: object = None,
        field: str | None = None,
        file: str | Path | None = None,
        line: int | None = None,
    ) -> None:
        self.expected = expected
        self.value = value
        self.field = field
        self.line = line
        self.file = None if file is None else str(file)
        super().__init__(self._one_line())

    def in_file(self, file: str | Path | None) -> BadInput:
        """The same error naming `file`; itself if it names one already, or there is none."""
        if self.file is not None or file is None:
            return self
        return BadInput(self.expected, value=self.value, field=self.field, file=file, line=self.line)

    def _one_line(self) -> str:
        place = self.file or ""
        if self.line is not None:
            place += f":{self.line}"
        where = ": ".join(part for part in (place, self.field) if part)
        value = "" if self.value is None else f"got {_short(self.value)}, "
        text = f"{where}: {value}{self.expected}" if where else f"{value}{self.expected}"
        return " ".join(text.split())


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Raise `BadInput` where the block cannot read `file` as text in UTF-8."""
    try:
        yield
    except BadInput:
        raise
    except OSError as error:
        raise BadInput(f"expected a readable file: {error.strerror}", file=file) from None
    except UnicodeDecodeError:
        raise BadInput("expected a text file in UTF-8", file=file) from None
    except ValueError as error:  # a null byte in the path
        raise BadInput(f"expected a path: {error}", value=str(file)) from None


def missing_extra(extra: str, error: ImportError, *, value: object = None, field: str | None = None) -> BadInput:
    """The refusal of a command whose optional packages are missing, with the command that installs them."""
    expected = f"expected the extra [{extra}] to be installed: pip install '.[{extra}]' in a checkout ({error})"
    return BadInput(expected, value=value, field=field)


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
