"""The tensors of a model directory, by name: safetensors, in one file or in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workloads.errors import BadInput

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """A directory's tensors. Use it in a `with`; files are mapped, and a tensor is read when it is asked for.

    Raises:
        BadInput: no safetensors in the directory, an index that cannot be read, or a shard that is missing or broken.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open = ExitStack()
        self._home: dict[str, Any] = {}
        try:
            for file in _files(directory):
                self._map(file)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def tensor(
        self, name: str, shape: tuple[int, ...] | None = None, types: tuple[torch.dtype, ...] = ()
    ) -> torch.Tensor:
        """One tensor, on the CPU, in the type that it was written in.

        Raises:
            BadInput: no tensor of that name, of another shape than the model's config says, or none of `types`.
        """
        if name not in self._home:
            raise BadInput("expected this tensor, which is missing", field=name, file=self.directory)
        found: torch.Tensor = self._home[name].get_tensor(name)
        if shape is not None and tuple(found.shape) != shape:
            expected = f"expected shape {list(shape)}, as the config says"
            raise BadInput(expected, field=name, value=list(found.shape), file=self.directory)
        if types and found.dtype not in types:
            expected = f"expected {' or '.join(str(each).removeprefix('torch.') for each in types)}"
            raise BadInput(expected, field=name, value=str(found.dtype).removeprefix("torch."), file=self.directory)
        return found

    def joined(self, names: Iterable[str], shapes: Iterable[tuple[int, ...]]) -> torch.Tensor:
        """Matrices that are multiplied with the same inputs, one below the other."""
        return torch.cat([self.tensor(name, shape) for name, shape in zip(names, shapes, strict=True)])

    def _map(self, file: Path) -> None:
        try:
            opened = self._open.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise BadInput(f"expected a safetensors file ({error})", file=file) from None
        for name in opened.offset_keys():
            self._home[name] = opened


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.exists():
        single = directory / SINGLE
        if not single.exists():
            raise BadInput(f"expected {SINGLE} or {INDEX} in it", file=directory)
        return [single]
    try:
        homes = json.loads(index.read_text())["weight_map"].values()
    except (ValueError, KeyError, AttributeError, TypeError):
        raise BadInput("expected JSON with a weight_map", file=index) from None
    files = [directory / name for name in sorted(set(homes))]
    for file in files:
        if not file.exists():
            raise BadInput("expected this shard, which the index names", file=file)
    return files
