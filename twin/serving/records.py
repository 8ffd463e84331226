"""What a run leaves behind: one record a request, one log an engine."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from workloads.request import Request

UNSET: Final = -1.0
"""A time that has not come."""

DECODE_STEP, MIXED_STEP, ONE_SHOT_STEP = 0, 1, 2
"""What a step was, in an engine's log."""


class RequestRecord:
    """One request, from the client's side. Times in seconds, `UNSET` while they have not come.

    Attributes:
        request, answer_tokens: what was asked, and how long the answer truly is (no scheduler sees that).
        queued: an engine took it in. scheduled: its first step began. first_token, last_token: those steps ended.
        output_tokens: what it got. cached_tokens: prompt tokens that a prefix cache spared it.
        preemptions: how often it lost its cache to others. attempts: engines that failed under it.
        replica: who finished it. delivered: output tokens it had before the engine it is on now.
    """

    __slots__ = (
        "answer_tokens", "attempts", "cached_tokens", "delivered", "first_token", "last_token", "output_tokens",
        "preemptions", "queued", "replica", "request", "scheduled",
    )  # fmt: skip

    def __init__(self, request: Request, answer_tokens: int) -> None:
        self.request, self.answer_tokens = request, answer_tokens
        self.queued = self.scheduled = self.first_token = self.last_token = UNSET
        self.output_tokens = self.cached_tokens = self.preemptions = self.attempts = self.delivered = 0
        self.replica = ""


class EngineLog:
    """The steps of one engine, in order, and what changed at which of them.

    Attributes:
        ends: when each step ended, seconds. decodes, repeats: run-length coded, decodes of successive steps whose gap
            to the step before is an inter-token latency. `odd_gaps`: inter-token latencies that are no step's: after a
            transfer or a preemption.
        starts, prefill_tokens, kinds: of the steps that were not fast-forwarded; `index` says which steps those are.
        changes: (time, running, waiting, free blocks) whenever membership could change, flat.
        busy: seconds in which a step ran.
    """

    def __init__(self, name: str, *, detail: bool) -> None:
        self.name, self.detail = name, detail
        self.ends = array("d")
        self.decodes, self.repeats = array("q"), array("q")
        self.odd_gaps = array("d")
        self.changes = array("d")
        self.index, self.starts = array("q"), array("d")
        self.prefill_tokens, self.kinds = array("q"), array("b")
        self.busy = 0.0
        self.events = 0

    def step(self, end: float, decodes: int) -> None:
        """One step ended, and so many tokens followed on those of the step before."""
        self.ends.append(end)
        if self.repeats and self.decodes[-1] == decodes:
            self.repeats[-1] += 1
        else:
            self.decodes.append(decodes)
            self.repeats.append(1)

    def steps(self, ends: list[float], decodes: int) -> None:
        """Several alike."""
        self.ends.extend(ends)
        if self.repeats and self.decodes[-1] == decodes:
            self.repeats[-1] += len(ends)
        else:
            self.decodes.append(decodes)
            self.repeats.append(len(ends))


class Columns:
    """What is kept of every request that is done: a few numbers each, so that a million of them fit.

    Without `detail` only what the summary needs. `model` and `replica` count through `models` and `replicas`.
    """

    def __init__(self, *, detail: bool) -> None:
        self.detail = detail
        self.arrival, self.queued, self.scheduled = array("d"), array("d"), array("d")
        self.first_token, self.last_token = array("d"), array("d")
        self.id, self.prompt_tokens, self.output_tokens = array("q"), array("q"), array("q")
        self.cached_tokens, self.preemptions, self.attempts = array("q"), array("q"), array("q")
        self.model, self.replica, self.one_shot = array("q"), array("q"), array("q")
        self.models: dict[str, int] = {}
        self.replicas: dict[str, int] = {}

    def add(self, record: RequestRecord) -> None:
        """A request is done."""
        request = record.request
        self.arrival.append(request.arrival)
        self.queued.append(record.queued)
        self.first_token.append(record.first_token)
        self.last_token.append(record.last_token)
        self.output_tokens.append(record.output_tokens)
        self.one_shot.append(request.one_shot)
        if not self.detail:
            return
        self.scheduled.append(record.scheduled)
        self.id.append(request.id)
        self.prompt_tokens.append(request.prompt_tokens)
        self.cached_tokens.append(record.cached_tokens)
        self.preemptions.append(record.preemptions)
        self.attempts.append(record.attempts)
        self.model.append(self.models.setdefault(request.model, len(self.models)))
        self.replica.append(self.replicas.setdefault(record.replica, len(self.replicas)))

    def table(self) -> dict[str, Any]:
        """Columns of one length, in the order in which requests were done; names in place of counts."""
        import numpy as np

        def column(values: array[Any]) -> Any:
            return np.frombuffer(values, dtype=values.typecode)

        plain = (
            "id", "arrival", "queued", "scheduled", "first_token", "last_token", "prompt_tokens", "output_tokens",
            "cached_tokens", "preemptions", "attempts",
        )  # fmt: skip
        models, replicas = np.array(list(self.models)), np.array(list(self.replicas))
        return {name: column(getattr(self, name)) for name in plain} | {
            "one_shot": column(self.one_shot).astype(bool),
            "model": models[column(self.model)],
            "replica": replicas[column(self.replica)],
        }
