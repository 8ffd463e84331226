"""A dictionary of the things that a scenario can name, to which plug-ins add."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Entry = TypeVar("Entry")


class Registry(dict[str, Entry]):
    """Entries by name, in the order in which they were registered."""

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """A decorator that adds an entry and returns it; `ValueError` if the name is taken."""
        if name in self:
            raise ValueError(f"expected a name that is not registered, found {name!r}")

        def add(entry: Entry) -> Entry:
            self[name] = entry
            return entry

        return add

    def select(self, name: str) -> Entry:
        """The entry of a name, or a `ValueError` that lists the names."""
        if name not in self:
            raise ValueError(f"expected one of {', '.join(self)}, found {name!r}")
        return self[name]
