"""The tensors of a model directory, by name: safetensors, in one file or in shards with an index."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workloads.errors import BadInput
from workloads.json_files import read_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """The tensors of a directory, mapped, to be used in a `with` block; `BadInput` for missing or broken files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open = ExitStack()
        self._home: dict[str, Any] = {}
        try:
            for file in weight_files(directory):
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
        """One tensor, on the CPU, in the type of the file; `BadInput` if its shape or type is not as expected."""
        if name not in self._home:
            raise BadInput("expected this tensor, which is missing", field=name, file=self.directory)
        tensor: torch.Tensor = self._home[name].get_tensor(name)
        if shape is not None and tuple(tensor.shape) != shape:
            expected = f"expected shape {list(shape)}, as the config says"
            raise BadInput(expected, field=name, value=list(tensor.shape), file=self.directory)
        if types and tensor.dtype not in types:
            expected = f"expected {' or '.join(str(dtype).removeprefix('torch.') for dtype in types)}"
            raise BadInput(expected, field=name, value=str(tensor.dtype).removeprefix("torch."), file=self.directory)
        return tensor

    def joined(self, names: Iterable[str], shapes: Iterable[tuple[int, ...]]) -> torch.Tensor:
        """Matrices with the same inputs, concatenated along their outputs."""
        return torch.cat([self.tensor(name, shape) for name, shape in zip(names, shapes, strict=True)])

    def _map(self, file: Path) -> None:
        try:
            opened = self._open.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise BadInput(f"expected a safetensors file ({error})", file=file) from None
        for name in opened.offset_keys():
            self._home[name] = opened


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory's model alone; `BadInput` if any is missing."""
    index = directory / INDEX
    if not index.exists():
        single = directory / SINGLE
        if not single.exists():
            raise BadInput(f"expected {SINGLE} or {INDEX} in it", file=directory)
        return [single]
    homes = read_json_object(index).get("weight_map")
    if not isinstance(homes, dict) or not homes:
        raise BadInput("expected an object of shards by tensor", field="weight_map", value=homes, file=index)
    for name, home in homes.items():
        if not isinstance(home, str) or Path(home).name != home:
            raise BadInput("expected a file name", field=f"weight_map.{name}", value=home, file=index)
    files = [directory / name for name in sorted(set(homes.values()))]
    for file in files:
        if not file.exists():
            raise BadInput("expected this shard, which the index lists", file=file)
    return files
