"""Messages as bytes: a header of 16 integers, then the tensors, each at its exact number of rows.

Tensors of the workers' devices may travel apart (`live.topologies.device_link`). The header has their rows all the
same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from live.topologies.transport import FIELDS, PAYLOADS, Form, Forms, Message, Payload, TransportError

HEADER = 1 + FIELDS + PAYLOADS + 1
"""Integers of a header: kind, fields, rows of each tensor, and the bytes of the whole message."""

HEADER_BYTES = 8 * HEADER

ALIGNMENT = 16
"""Bytes that the beginning of a tensor in a buffer is a multiple of."""


def capacity(forms: Forms) -> int:
    """Bytes of the largest message that the forms allow."""
    return HEADER_BYTES + max(sum(_aligned(p.rows * p.row_bytes) for p in f.payloads) for f in forms.values())


ReceiveApart = Callable[[list[tuple[int, Payload, int]]], list[torch.Tensor]]
"""Receives the tensors that travel apart: (place in the message, payload, rows) of each."""


def pack(message: Message, apart: Form | None = None) -> torch.Tensor:
    """A message as bytes. `apart`: its form, whose tensors of devices are left out."""
    rows = [tensor.shape[0] for tensor in message.tensors]
    header = [message.kind, *message.fields, *[0] * (FIELDS - len(message.fields)), *rows]
    tensors = message.tensors if apart is None else on_host(message, apart)
    sizes = [_aligned(tensor.nbytes) for tensor in tensors]
    buffer = torch.empty(HEADER_BYTES + sum(sizes), dtype=torch.uint8)
    header += [0] * (HEADER - 1 - len(header)) + [buffer.nbytes]
    buffer[:HEADER_BYTES].view(torch.int64).copy_(torch.tensor(header))
    begin = HEADER_BYTES
    for tensor, size in zip(tensors, sizes, strict=True):
        buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        begin += size
    return buffer


def message_bytes(header: torch.Tensor) -> int:
    """Bytes of the message with this header, at least those of the header; 0 for what cannot be one."""
    size = int(header.view(torch.int64)[-1])
    return size if size >= HEADER_BYTES else 0


def as_bytes(buffer: torch.Tensor) -> memoryview:
    """The memory of a buffer of bytes."""
    return memoryview(buffer.numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers from Python 3.12 on


def on_host(message: Message, form: Form) -> list[torch.Tensor]:
    """The tensors of a message that are on the host."""
    pairs = zip(message.tensors, form.payloads, strict=True)
    return [tensor for tensor, payload in pairs if not payload.on_device]


def on_device(message: Message, form: Form) -> list[torch.Tensor]:
    """The tensors of a message that are on the workers' devices."""
    pairs = zip(message.tensors, form.payloads, strict=True)
    return [tensor for tensor, payload in pairs if payload.on_device]


def unpack(buffer: torch.Tensor, forms: Forms, apart: ReceiveApart | None = None) -> Message:
    """The message at the beginning of a buffer; its tensors are views of it.

    Args:
        apart: receives the tensors of devices; None if they are in the buffer, too.

    Raises:
        TransportError: an unknown kind, or more rows than its form allows.
    """
    kind, *header = buffer[:HEADER_BYTES].view(torch.int64).tolist()
    form: Form | None = forms.get(kind)
    if form is None:
        raise TransportError(f"a message of kind {kind}: expected one of {sorted(forms)}")
    begin, tensors = HEADER_BYTES, []
    following: list[tuple[int, Payload, int]] = []
    for place, (payload, rows) in enumerate(zip(form.payloads, header[FIELDS:], strict=False)):
        if not 0 <= rows <= payload.rows:
            raise TransportError(f"a message of kind {kind} with {rows} rows: expected at most {payload.rows}")
        if apart is not None and payload.on_device:
            following.append((place, payload, rows))
            continue
        end = begin + rows * payload.row_bytes
        tensors.append(buffer[begin:end].view(payload.dtype).view(rows, *payload.row))
        begin += _aligned(end - begin)
    if apart is not None and following:
        for (place, _, _), tensor in zip(following, apart(following), strict=True):
            tensors.insert(place, tensor)
    return Message(kind, tuple(header[: form.fields]), tuple(tensors))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
