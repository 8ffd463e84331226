"""A GPU that is not there. Its tensors have types, shapes, strides and a device; what the host reads of them is zeros.

PyTorch's own fake tensors do most of it: an operation on tensors of two devices fails, as it would there. What is here
besides is the border between host and device, where PyTorch needs a real one: copies, reads, streams, events, graphs.

Whatever the host waits for is written down. In a graph it fails, since a graph holds no waiting and no reading of the
host's memory. Copies from memory that is not pinned wait, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

NAME = "no GPU: a pretended H200"
PROPERTIES = SimpleNamespace(
    name=NAME, multi_processor_count=132, major=9, minor=0, total_memory=141 << 30, L2_cache_size=60 << 20,
    shared_memory_per_block_optin=227 << 10,
)  # fmt: skip

MILLISECONDS = 0.01
"""Each piece of the device's work takes this long by its own clock, which has to move."""

PINNED = "pretended_pinned"
READS = frozenset({"cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"})

FAKES = FakeTensorMode(allow_non_fake_inputs=True)


def _not_yet(event: Any) -> bool:
    """What an event tells: the device is never done before the host waits for it."""
    return False


class Refused(AssertionError):
    """Something that a GPU, or a graph on one, would not do."""


class PretendedGPU:
    """The device, for the rest of the process.

    Attributes:
        waits: what the host has waited for, in order. capturing: whether a graph is being captured. captured, replayed:
            how many graphs were. done: how much the device has had to do.
        capture_streams: the streams that graphs were captured on; None for PyTorch's own.
    """

    def __init__(self) -> None:
        self.capturing = False
        self.capture_streams: set[Any] = set()
        self.forget()
        torch._C._ensureCUDADeviceGuardSet()
        if hasattr(fake_tensor, "init_gpu_context"):  # a build for CUDA asks the driver, which is not there
            fake_tensor.init_gpu_context = lambda device: None
        # Fakes do not see through inference mode.
        torch.inference_mode = lambda mode=True: torch.no_grad()  # type: ignore[misc, assignment]
        generator = torch.Generator
        torch.Generator = lambda device="cpu": generator("cpu")  # type: ignore[misc, assignment]
        for name, stand_in in self._stand_ins().items():
            setattr(torch.cuda, name, stand_in)
        border = Border(self)
        border.__enter__()
        FakeTensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]
        FakeTensor.tolist = lambda tensor: border.read(tensor, "tolist")  # type: ignore[method-assign]

    def forget(self) -> None:
        """Count anew."""
        self.waits: list[str] = []
        self.captured = self.replayed = self.done = 0

    def work(self) -> None:
        """The device has something to do, which takes `MILLISECONDS`."""
        self.done += 1

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        if self.capturing:
            raise Refused(f"a graph cannot hold it: {what}")
        self.waits.append(what)

    @contextlib.contextmanager
    def _graph(
        self, graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """`torch.cuda.graph`."""
        if self.capturing:
            raise Refused("a graph within a graph")
        self.capturing = True
        before = self.done
        self.capture_streams.add(stream)
        try:
            yield
        finally:
            self.capturing = False
        self.captured += 1
        graph.held = self.done - before
        self.done = before

    def _stand_ins(self) -> dict[str, Any]:
        """Functions of `torch.cuda`."""
        gpu = self

        class Stream:
            def __init__(self, *_: Any, **__: Any) -> None: ...
            def synchronize(self) -> None:
                gpu.wait("a stream")

            def wait_stream(self, stream: Stream) -> None: ...
            def wait_event(self, event: Event) -> None: ...

        class Event:
            def __init__(self, *_: Any, **__: Any) -> None: ...
            def record(self, *_: Any) -> None:
                self.done = gpu.done

            def synchronize(self) -> None:
                gpu.wait("an event")

            query = _not_yet

            def elapsed_time(self, later: Event) -> float:
                return MILLISECONDS * (later.done - self.done)

        class CUDAGraph:
            held = 0

            def replay(self) -> None:
                gpu.replayed += 1
                gpu.done += self.held

        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_name": lambda *_: NAME,
            "get_device_properties": lambda *_: PROPERTIES,
            "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
            "mem_get_info": lambda *_: (130 << 30, PROPERTIES.total_memory),
            "empty_cache": lambda: None,
            "_sleep": lambda cycles: None,
            "clock_rate": lambda *_: 1980,
            "memory_allocated": lambda *_: 1 << 30,
            "max_memory_allocated": lambda *_: 3 << 30,
            "reset_peak_memory_stats": lambda *_: None,
            "synchronize": lambda *_: gpu.wait("the device"),
            "current_stream": Stream,
            "stream": lambda _: contextlib.nullcontext(),
            "graph_pool_handle": lambda: (0, 1),
            "graph": gpu._graph,
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": CUDAGraph,
        }


class Border(TorchFunctionMode):
    """Every call of PyTorch that Python makes: those that cross from host to device or back are done here."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "__get__":  # an attribute
            return func(*args)
        if name == "copy_" and any(isinstance(argument, FakeTensor) for argument in args[:2]):
            return self._copy(*args, **kwargs)
        here = not (args and isinstance(args[0], FakeTensor))
        return (self._on_host if here else self._on_device)(func, name, args, kwargs)

    def _on_device(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call whose first argument is on the device."""
        if name in READS:
            return self.read(args[0], name)
        if name in ("__getitem__", "__setitem__", "contiguous"):
            with self:
                return getattr(self, f"_{name.strip('_')}")(*args)
        self.gpu.work()
        with FAKES:  # what it makes on the way is to be pretended, too
            return func(*args, **kwargs)

    def _on_host(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Any other call: it may make something on the device, or send something there."""
        if name == "cuda" or (name == "to" and _to_gpu(args[1:], kwargs)):
            return self._sent(args[0], _dtype(args[1:], kwargs), kwargs.get("non_blocking", False))
        if _to_gpu((), kwargs):
            return self._made(func, args, kwargs)
        pinned = kwargs.pop("pin_memory", False)
        result = args[0] if name == "pin_memory" else func(*args, **kwargs)
        if pinned or name == "pin_memory":
            setattr(result, PINNED, True)
        return result

    def read(self, tensor: torch.Tensor, name: str) -> Any:
        """The host reads zeros."""
        if name == "numpy":
            raise Refused("numpy() of a tensor on the device")
        self.gpu.wait(f"{name} of {list(tensor.shape)}")
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return zeros if name == "cpu" else getattr(zeros, name)()

    def _copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if torch.broadcast_shapes(to.shape, source.shape) != to.shape:
            raise Refused(f"a copy of {list(source.shape)} to {list(to.shape)}")
        self.gpu.work()
        if not isinstance(to, FakeTensor):
            self._cross(to, non_blocking)
            to.zero_()
        elif not isinstance(source, FakeTensor):
            self._cross(source, non_blocking)
        return to

    def _sent(self, tensor: torch.Tensor, dtype: torch.dtype | None, non_blocking: bool) -> torch.Tensor:
        self._cross(tensor, non_blocking)
        if self.gpu.capturing:
            raise Refused("a graph holds no copy of memory that is the host's at the time")
        with FAKES:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cuda")

    def _cross(self, host: torch.Tensor, non_blocking: bool) -> None:
        """A copy to or from memory of the host."""
        pinned = getattr(host, PINNED, False) or getattr(host._base, PINNED, False)
        if not (non_blocking and pinned):
            self.gpu.wait(f"a copy of {list(host.shape)}")

    def _made(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A new tensor on the device."""
        if func in (torch.tensor, torch.as_tensor):
            device = kwargs.pop("device")
            with self:
                return func(*args, **kwargs).to(device)
        kwargs.pop("generator", None)
        with FAKES:
            return func(*args, **kwargs)

    # PyTorch's own versions of these ask a device that is not there.

    def _contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)

    def _setitem(self, tensor: torch.Tensor, key: Any, value: Any) -> None:
        part = self._getitem(tensor, key)
        if isinstance(value, torch.Tensor):
            part.copy_(value)
        else:
            part.fill_(value)

    def _getitem(self, tensor: torch.Tensor, key: Any) -> torch.Tensor:
        keys = list(key) if isinstance(key, tuple) else [key]
        dots = [i for i, key in enumerate(keys) if key is Ellipsis]
        for i in dots:
            keys[i : i + 1] = [slice(None)] * (tensor.dim() - sum(key is not None for key in keys) + 1)
        indices: list[torch.Tensor | None] = []
        for key in keys:
            dim = len(indices)
            if key is None:
                tensor = tensor.unsqueeze(dim)
            elif isinstance(key, int):
                tensor = tensor.select(dim, key)
                continue
            elif isinstance(key, slice):
                tensor = torch.ops.aten.slice(tensor, dim, *key.indices(tensor.shape[dim]))
            indices.append(None if key is None or isinstance(key, slice) else self._index(key))
        return tensor if all(key is None for key in indices) else torch.ops.aten.index(tensor, indices)

    def _index(self, index: Any) -> torch.Tensor:
        """Rows that are chosen: the host's go to the device first."""
        tensor = torch.as_tensor(index)
        return tensor if isinstance(tensor, FakeTensor) else tensor.to("cuda")


def _to_gpu(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns True if arguments name the device, or a tensor on it."""
    named = [*args, kwargs.get("device"), kwargs.get("other")]
    devices = [torch.device(name) for name in named if isinstance(name, str | torch.device)]
    return any(name.type == "cuda" for name in devices) or any(isinstance(name, FakeTensor) for name in named)


def _dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    dtypes = [argument for argument in (*args, kwargs.get("dtype")) if isinstance(argument, torch.dtype)]
    return dtypes[0] if dtypes else None
