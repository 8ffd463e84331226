"""Entries in the order of their latest use, as a linked list: to move one takes no search and makes no object."""

from __future__ import annotations

from collections.abc import Iterator


class Linked:
    """An entry of a `RecencyList`, one at a time; a subclass sets both neighbours to None at first."""

    __slots__ = ("after", "before")

    def __init__(self) -> None:
        self.before: Linked | None = None
        self.after: Linked | None = None


class RecencyList:
    """Entries, the least recently used first.

    Attributes:
        first, last: None where the list is empty. size: the number of entries.
    """

    __slots__ = ("first", "last", "size")

    def __init__(self) -> None:
        self.first: Linked | None = None
        self.last: Linked | None = None
        self.size = 0

    def append(self, entry: Linked) -> None:
        """Put an entry that is in no list behind all others."""
        last = self.last
        entry.before = last
        if last is None:
            self.first = entry
        else:
            last.after = entry
        self.last = entry
        self.size += 1

    def prepend(self, entry: Linked) -> None:
        """Put an entry that is in no list before all others."""
        first = self.first
        entry.after = first
        if first is None:
            self.last = entry
        else:
            first.before = entry
        self.first = entry
        self.size += 1

    def remove(self, entry: Linked) -> None:
        """Take an entry out."""
        before, after = entry.before, entry.after
        if before is None:
            self.first = after
        else:
            before.after = after
        if after is None:
            self.last = before
        else:
            after.before = before
        entry.before = entry.after = None
        self.size -= 1

    def move_to_end(self, entry: Linked) -> None:
        """Put an entry of this list behind all others."""
        if entry.after is not None:
            self.remove(entry)
            self.append(entry)

    def __iter__(self) -> Iterator[Linked]:
        """From the least recently used on. The list may not change meanwhile."""
        entry = self.first
        while entry is not None:
            yield entry
            entry = entry.after
