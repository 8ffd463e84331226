"""A dictionary of the things that a scenario can name, to which plug-ins add.

A registry is a dictionary from the name that a configuration uses to a factory or function. The allowed names of a
setting are the keys of its registry. A plug-in is one Python file that adds its own policy when it is imported:

    from schedulers.routing import ROUTERS

    class LongestPrefix:
        def choose(self, request, engines):
            return max(engines, key=lambda engine: engine.cached_prefix_tokens(request))

    ROUTERS.register("longest_prefix")(lambda draw: LongestPrefix())

A scenario lists the file under `plugins`, and it is imported before the fields are checked. The registries are
`SCHEDULING_POLICIES` and `PREEMPTION_POLICIES` (`schedulers.scheduling_policies`), `CHUNK_POLICIES` and
`DRAFT_POLICIES` (`schedulers.step_policies`), `ROUTERS` (`schedulers.routing`), `SCALING_POLICIES`
(`schedulers.autoscaling`) and `REFILL_POLICIES` (`schedulers.bundle_slots`). Traces have theirs: `TRACE_FORMATS`
(`workloads.traces`).
"""

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
