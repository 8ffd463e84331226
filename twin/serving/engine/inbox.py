"""Inbox of an engine between its step ends: requests, and prompts to reserve blocks for."""

from __future__ import annotations

from collections.abc import Callable

from schedulers.admission_control import RequestShed
from schedulers.engine_core import EngineCore
from schedulers.parallel_cores import LockstepGroup
from twin.serving.records.overload import Backlog
from twin.serving.records.requests import RequestRecord
from workloads.errors import BadInput
from workloads.request import Request

Answer = Callable[[bool], None]
"""Called with whether blocks have been reserved."""

Shed = Callable[[RequestRecord, RequestShed], None]

Submission = tuple[RequestRecord, Request, int | None, bool, bool]
"""A request for `EngineCore.submit`: its record, the request, and the options max_tokens, remote_prefill, hold_blocks.
"""


class Inbox:
    """Requests and reservations that an engine's scheduler gets at the next step end.

    Attributes:
        requests, reservations: in order. load: tokens that they add to the engine's load.
    """

    def __init__(self) -> None:
        self.requests: list[Submission] = []
        self.reservations: list[tuple[RequestRecord, Answer]] = []
        self.load = 0

    def add(self, submission: Submission, core: EngineCore | LockstepGroup) -> None:
        """Add a request. If blocks are reserved for it, the scheduler counts its load already."""
        _, request, max_tokens, remote_prefill, _ = submission
        self.requests.append(submission)
        if not (remote_prefill and request.id in core.reserved):
            self.load += request.prompt_tokens + (max_tokens or request.max_tokens)

    def reserve(self, record: RequestRecord, answer: Answer) -> None:
        """Add a prompt that a prefill engine computes."""
        self.reservations.append((record, answer))
        self.load += record.request.prompt_tokens + record.request.max_tokens

    def cancel(self, record: RequestRecord) -> None:
        """Take out the reservation for a request, if there is one."""
        self.reservations = [entry for entry in self.reservations if entry[0] is not record]

    def accept(self, core: EngineCore | LockstepGroup, now: float, backlog: Backlog, on_shed: Shed) -> None:
        """Pass everything to the scheduler, reservations first.

        Raises:
            BadInput: a request does not fit into the KV memory, even alone.
        """
        if self.reservations:
            self._decide_reservations(core, now)
        for record, request, max_tokens, remote_prefill, hold_blocks in self.requests:
            try:
                sequence = core.submit(
                    request, now, max_tokens=max_tokens, remote_prefill=remote_prefill, hold_blocks=hold_blocks,
                    never_shed=record.attempts > 0,
                )  # fmt: skip
            except RequestShed as shed:
                backlog.withdraw(now)
                on_shed(record, shed)
                continue
            except ValueError as error:
                field = "max_num_batched_tokens" if "max_num_batched_tokens" in str(error) else "num_gpu_blocks"
                raise BadInput(str(error), field=f"engine.{field}") from None
            sequence.payload = record
            if record.queued < 0:
                record.queued = now
        self.requests.clear()
        self.load = 0

    def _decide_reservations(self, core: EngineCore | LockstepGroup, now: float) -> None:
        """Answer whether blocks can be reserved, and reserve them."""
        reservations = self.reservations
        self.reservations = []
        for record, answer in reservations:
            request = record.request
            self.load -= request.prompt_tokens + request.max_tokens
            sequence = None if request.id in core.sequences else core.reserve(request, now)
            if sequence is not None:
                sequence.payload = record
            answer(sequence is not None)

    def clear(self) -> list[RequestRecord]:
        """Empty it; returns the records of its requests."""
        records = [record for record, *_ in self.requests]
        self.requests.clear()
        self.reservations.clear()
        self.load = 0
        return records
