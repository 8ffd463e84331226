"""Messages as bytes: a header of 16 integers, then the tensors, each at its exact number of rows."""

from __future__ import annotations

import torch

from live.topologies.transport import FIELDS, PAYLOADS, Form, Forms, Message, TransportError

HEADER = 1 + FIELDS + PAYLOADS + 1
"""Integers of a header: kind, fields, rows of each tensor, and one that is 0."""

ALIGNMENT = 16
"""Bytes that the beginning of a tensor in a buffer is a multiple of."""


def capacity(forms: Forms) -> int:
    """Bytes of the largest message that the forms allow."""
    return 8 * HEADER + max(sum(_aligned(p.rows * p.row_bytes) for p in f.payloads) for f in forms.values())


def pack(message: Message) -> torch.Tensor:
    """A message as bytes."""
    rows = [tensor.shape[0] for tensor in message.tensors]
    header = [message.kind, *message.fields, *[0] * (FIELDS - len(message.fields)), *rows]
    sizes = [_aligned(tensor.nbytes) for tensor in message.tensors]
    buffer = torch.empty(8 * HEADER + sum(sizes), dtype=torch.uint8)
    buffer[: 8 * HEADER].view(torch.int64).copy_(torch.tensor(header + [0] * (HEADER - len(header))))
    begin = 8 * HEADER
    for tensor, size in zip(message.tensors, sizes, strict=True):
        buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        begin += size
    return buffer


def unpack(buffer: torch.Tensor, forms: Forms) -> Message:
    """The message at the beginning of a buffer; its tensors are views of it.

    Raises:
        TransportError: an unknown kind, or more rows than its form allows.
    """
    kind, *header = buffer[: 8 * HEADER].view(torch.int64).tolist()
    form: Form | None = forms.get(kind)
    if form is None:
        raise TransportError(f"a message of kind {kind}: expected one of {sorted(forms)}")
    begin, tensors = 8 * HEADER, []
    for payload, rows in zip(form.payloads, header[FIELDS:], strict=False):
        if not 0 <= rows <= payload.rows:
            raise TransportError(f"a message of kind {kind} with {rows} rows: expected at most {payload.rows}")
        end = begin + rows * payload.row_bytes
        tensors.append(buffer[begin:end].view(payload.dtype).view(rows, *payload.row))
        begin += _aligned(end - begin)
    return Message(kind, tuple(header[: form.fields]), tuple(tensors))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
