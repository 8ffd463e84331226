"""Copies between host and device that run while the host goes on."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, made without waiting for its current work."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class PendingHostCopy:
    """A copy of a tensor's present values to the host, whatever later work on the same stream writes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def numpy(self) -> npt.NDArray[Any]:
        """The values; waits until they have been copied."""
        if self._copied is not None:
            self._copied.synchronize()
        values: npt.NDArray[Any] = self._host.numpy()
        return values
