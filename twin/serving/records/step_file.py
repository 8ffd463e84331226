"""A temporary file for the steps of engines that are no longer needed in memory until the end of a run."""

from __future__ import annotations

import os
import tempfile
import weakref
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.records.run_directory import naming


class StepFile:
    """Arrays of numbers, appended to a file and read by their place in it.

    Args:
        path: of the file; None: a nameless one that ends with this object. new: begin an empty file.

    Raises:
        OSError: carrying a path, when the disk does not take it.
    """

    def __init__(self, path: Path | None = None, *, new: bool = True) -> None:
        self._path = path or Path(tempfile.gettempdir())
        with naming(self._path), path.open("w+b" if new else "rb") if path else tempfile.TemporaryFile() as opened:
            self._file = os.dup(opened.fileno())
        self._end = 0
        weakref.finalize(self, os.close, self._file)

    def append(self, values: array[Any]) -> int:
        """Append numbers; returns their place, a byte offset."""
        place, remainder = self._end, memoryview(values).cast("B")
        with naming(self._path):
            while remainder:
                size = os.pwrite(self._file, remainder, self._end)
                self._end = self._end + size
                remainder = remainder[size:]
        return place

    def read(self, place: int, count: int, typecode: str) -> NDArray[Any]:
        """Read `count` numbers of a type of `array` that begin at a place."""
        size = count * array(typecode).itemsize
        return np.frombuffer(os.pread(self._file, size, place), dtype=typecode)
