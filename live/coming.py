"""Numbers on their way from the device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


class Coming:
    """A tensor that is copied to the host while the host goes on. What it held when this was made is what comes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()

    def numpy(self) -> npt.NDArray[Any]:
        """The numbers; waits for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: npt.NDArray[Any] = self._host.numpy()
        return found
