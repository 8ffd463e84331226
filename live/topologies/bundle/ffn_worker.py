"""An FFN instance of a bundle: it keeps nothing from one message to the next but its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from live.models.decoder import FFNRows
from live.models.weights import FFN
from live.topologies.bundle.layout import OUTPUT, ROWS, BundleLayout
from live.topologies.bundle.stages import FFNStages, GraphedFFNStages
from live.topologies.transport import IDLE, STOP, Message, Receive, Role, Transport, TransportError, received


class FFNWorker:
    """Computes the FFN stage for all attention instances together. `graphs`: as CUDA graphs, padded."""

    def __init__(
        self, layout: BundleLayout, ffns: Sequence[FFN], transport: Transport, *, graphs: bool = False
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._stages = GraphedFFNStages(ffns) if graphs else FFNStages(ffns)

    def run(self) -> Role:
        """One microbatch after the other, in the instances' order: waiting for all is the barrier of AFD 3.1."""
        while True:
            messages: list[Message] = []
            for source in self._layout.attention_ranks:
                messages.append(received((yield Receive(source))))
            kind = _common(messages)
            if kind == STOP:
                return
            if kind != IDLE:
                self._compute(messages)

    def _compute(self, messages: Sequence[Message]) -> None:
        fields = messages[0].fields
        counts = [message.tensors[0].shape[0] for message in messages]
        present = [message.tensors for message, count in zip(messages, counts, strict=True) if count]
        if present:
            columns = [torch.cat(column) if len(column) > 1 else column[0] for column in zip(*present, strict=True)]
            output = self._stages.layer(fields[1], FFNRows(*columns))
        else:
            output = messages[0].tensors[0]
        parts = output.split(counts) if len(counts) > 1 else (output,)
        for rank, part in zip(self._layout.attention_ranks, parts, strict=True):
            self._transport.send(rank, Message(OUTPUT, fields, (part,)))


def _common(messages: Sequence[Message]) -> int:
    first = messages[0]
    for i, message in enumerate(messages):
        if (message.kind, message.fields) != (first.kind, first.fields) or message.kind not in (STOP, IDLE, ROWS):
            raise TransportError(
                f"attention {i} sent {message.kind, message.fields}, attention 0 {first.kind, first.fields}: expected "
                "the same microbatch and layer of all"
            )
    return first.kind
