"""Bounds on a piece of YAML, checked event by event before any value is built.

The C loader recurses once a level of nesting and overflows the stack of the process some 20,000 levels down. A few
lines of aliases can stand for gigabytes. The parser of events does neither: it keeps a stack of its own, and an alias
is one event.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_BYTES = 32 * 2**20
"""Bytes of a text file: far more than a scenario, a calibration or a kernel table takes."""

MAX_DEPTH = 100
"""Levels of nested mappings and lists."""

MAX_VALUES = 1_000_000
"""Keys, values, mappings and lists, with each alias counted as all that it stands for. Reading them takes 400 MB."""

MAX_BITS = 1023
"""Bits of a whole number: as many as a float can hold. Python does not even print one of 4,300 decimal digits."""


def check_limits(text: str, loader: type[Any]) -> None:
    """Parse the events of `text` and compare nesting and the number of values with the limits above.

    Stops at the first event beyond a limit, so the time is bounded by the limits whatever the text is. An alias of
    something unknown is left to the loader.
    """
    values, open_nodes = 0, list[tuple[str | None, int]]()
    sizes: dict[str | None, int | None] = {}
    for event in yaml.parse(text, loader):
        match event:
            case yaml.AliasEvent():
                size = sizes.get(event.anchor, 1)
                if size is None:
                    raise _fault(f"the alias {event.anchor} stands inside what it names", event)
                values += size
            case yaml.CollectionStartEvent():
                open_nodes.append((event.anchor, values))
                sizes |= {event.anchor: None} if event.anchor else {}
                values += 1
            case yaml.CollectionEndEvent():
                anchor, before = open_nodes.pop()
                sizes |= {anchor: values - before} if anchor else {}
            case yaml.ScalarEvent():
                sizes |= {event.anchor: 1} if event.anchor else {}
                values += 1
        if len(open_nodes) > MAX_DEPTH:
            raise _fault(f"nested more than {MAX_DEPTH} deep", event)
        if values > MAX_VALUES:
            raise _fault(f"more than {MAX_VALUES:,} values, aliases counted as what they stand for", event)


def _fault(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
