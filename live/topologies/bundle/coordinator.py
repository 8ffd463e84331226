"""The coordinator of a bundle: the one queue that all requests wait in, and the slots that they enter (AFD 5.1).

`schedulers.bundle_slots`, which the twin drives too, decides. After each step of a microbatch the attention workers
report its new tokens, and the coordinator answers with who leaves, who enters, and which microbatches go on.
`BundleLayout` has the ranks of the workers and the forms of their messages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from live.backend import BackendLimits, BackendState
from live.engine import Progress
from live.generation import Generation
from live.models.config import ModelConfig
from live.topologies.deployment import FrontRole, OnProgress
from live.topologies.transport import (
    COMMON_FORMS,
    IDLE,
    STOP,
    Form,
    Forms,
    Idle,
    Message,
    Payload,
    Receive,
    Role,
    Transport,
    TransportError,
    append_token,
    pack_requests,
    read_tokens,
    received,
    request_payloads,
    token_payloads,
)
from schedulers.bundle_slots import BundleSlots, Microbatch, Refill, refill_fcfs
from schedulers.engine_config import EngineConfig

COMMAND, RESULT, ROWS, OUTPUT = range(2, 6)
"""Kinds of messages.

COMMAND, coordinator to attention: microbatches to start (a bit each), requests that enter slots, ids to abort.
RESULT, attention to coordinator: the microbatch whose step has ended, free KV blocks, preemptions; its new tokens.
ROWS, attention to FFN: microbatch and layer; the rows of an FFN stage (`live.models.decoder.FFNRows`).
OUTPUT, FFN to attention: microbatch and layer; the FFN's output for those rows.
"""

COORDINATOR = 0
"""The coordinator's rank."""


@dataclass(frozen=True)
class BundleLayout:
    """x attention and y FFN instances, m microbatches in flight; `engine`: settings of one microbatch of one."""

    attention_instances: int
    ffn_instances: int
    microbatches: int
    engine: EngineConfig

    @property
    def batch_size(self) -> int:
        """B, slots of one attention instance in one microbatch."""
        return self.engine.max_num_seqs

    @property
    def attention_ranks(self) -> range:
        """Ranks of the attention workers."""
        return range(1, 1 + self.attention_instances)

    @property
    def ffn_ranks(self) -> range:
        """Ranks of the FFN workers."""
        first = 1 + self.attention_instances
        return range(first, first + self.ffn_instances)

    @property
    def names(self) -> list[str]:
        instances = (("attention", self.attention_instances), ("ffn", self.ffn_instances))
        return ["coordinator", *(f"{role} {i}" for role, count in instances for i in range(count))]

    def shares(self, rows: int, instance: int, microbatch: int) -> list[int]:
        """Consecutive rows for each FFN instance, as many but for one; instances begin apart to spread larger ones."""
        share, remainder = divmod(rows, self.ffn_instances)
        start = instance + microbatch
        return [share + ((i - start) % self.ffn_instances < remainder) for i in range(self.ffn_instances)]

    def limits(self, config: ModelConfig) -> BackendLimits:
        return BackendLimits.of(config, [self.engine] * (self.attention_instances * self.microbatches))

    def forms(self, config: ModelConfig, dtype: torch.dtype) -> Forms:
        """The forms of the messages. Buffers have these sizes from the start: no step needs larger ones."""
        shape, rows, slots = config.shape, self.engine.max_num_batched_tokens, self.batch_size * self.microbatches
        longest = self.limits(config).max_model_len
        experts = (shape.experts_per_token,)
        routed = (
            Payload(torch.float32, rows, experts, on_device=True),
            Payload(torch.int32, rows, experts, on_device=True),
        )
        hidden = Payload(dtype, rows, (shape.hidden,), on_device=True)
        leaving = Payload(torch.int64, 2 * slots * self.attention_instances)  # each worker gets those of all
        return {
            **COMMON_FORMS,
            COMMAND: Form(1, (*request_payloads(slots, longest, longest // self.engine.prefix_id_tokens), leaving)),
            RESULT: Form(3, token_payloads(self.batch_size)),
            ROWS: Form(2, (hidden, *routed) if shape.experts else (hidden,)),
            OUTPUT: Form(2, (hidden,)),
        }


class Coordinator(FrontRole):
    """Admits requests to slots, and keeps what clients know of them. Calls take effect as a step ends."""

    def __init__(
        self,
        layout: BundleLayout,
        max_model_len: int,
        transport: Transport,
        on_progress: OnProgress,
        refill: Refill = refill_fcfs,
    ) -> None:
        super().__init__("a bundle gives", max_model_len, transport, on_progress)
        self._layout = layout
        self.slots = BundleSlots(layout.attention_instances, layout.microbatches, layout.batch_size, refill)
        blocks = layout.engine.num_gpu_blocks
        places = [(index, i) for index in range(layout.microbatches) for i in range(layout.attention_instances)]
        self.num_free_blocks = dict.fromkeys(places, blocks)
        self.preemptions = dict.fromkeys(places, 0)
        self._cancelled: set[int] = set()  # residents to abort at the end of their step
        self._leaving: list[int] = []  # ids that the attention workers must abort before they go on

    # -- called from outside -----------------------------------------------------------------------------------------

    def state(self) -> BackendState:
        layout = self._layout
        blocks = layout.engine.num_gpu_blocks * layout.microbatches * layout.attention_instances
        usage = 1 - sum(self.num_free_blocks.values()) / blocks
        running = sum(microbatch.requests for microbatch in self.slots.microbatches)
        waiting = len(self._arriving) + len(self.slots.waiting)
        return BackendState(running, waiting, usage, preemptions=sum(self.preemptions.values()))

    # -- the role ----------------------------------------------------------------------------------------------------

    def run(self) -> Role:
        """Start microbatches, collect their results, and so on, until it is stopped and none runs."""
        running: deque[Microbatch] = deque()
        while True:
            self._take_calls()
            started = self._begin_idle(running)
            running.extend(started)
            if started:
                self._command(started)
            elif self._stopping:
                break
            else:
                self._send_all(self._layout.attention_ranks, IDLE)
                yield Idle()
            while running:
                microbatch = running.popleft()
                rows: list[list[int]] = []
                for rank in self._layout.attention_ranks:
                    message = received((yield Receive(rank)))
                    rows += self._read(message, rank, microbatch)
                progress = self._end_step(microbatch, rows)
                self._take_calls()
                started = self._begin_idle([*running, microbatch])
                if self.slots.begin_step(microbatch.index) is not None:
                    started.insert(0, microbatch)
                self._command(started)
                running.extend(started)
                self._on_progress(progress)
        self._send_all(self._layout.attention_ranks, STOP)

    def _enter(self, generation: Generation) -> None:
        self.slots.submit([(generation.request.id, generation.request.prompt_tokens)])

    def _abort(self, generation: Generation) -> None:
        request_id = generation.request.id
        if any(request_id in microbatch.resident for microbatch in self.slots.microbatches):
            self._cancelled.add(request_id)
        else:
            self.slots.withdraw(request_id)
            self._generations.pop(request_id).finish_reason = "abort"

    def _begin_idle(self, busy: deque[Microbatch] | list[Microbatch]) -> list[Microbatch]:
        """Begin a step of each microbatch that is not busy and gets requests."""
        idle = [microbatch.index for microbatch in self.slots.microbatches if microbatch not in busy]
        return [microbatch for index in idle if (microbatch := self.slots.begin_step(index)) is not None]

    def _command(self, started: list[Microbatch]) -> None:
        """Tell each attention worker which microbatches start, and its own requests that enter and leave."""
        mask = sum(1 << microbatch.index for microbatch in started)
        entering: list[list[tuple[Generation, int]]] = [[] for _ in self._layout.attention_ranks]
        now = self._transport.clock()
        for microbatch in started:
            for request_id in microbatch.admitted:
                instance, _ = microbatch.resident[request_id]
                generation = self._generations[request_id]
                generation.scheduled = now
                entering[instance].append((generation, microbatch.index))
        leaving = torch.tensor(self._leaving, dtype=torch.int64)
        self._leaving = []
        for rank, entered in zip(self._layout.attention_ranks, entering, strict=True):
            self._transport.send(rank, Message(COMMAND, (mask,), (*pack_requests(entered), leaving)))

    def _read(self, message: Message, rank: int, microbatch: Microbatch) -> list[list[int]]:
        if message.kind != RESULT or message.fields[0] != microbatch.index:
            raise TransportError(
                f"{self._layout.names[rank]} sent {message.kind, message.fields}: expected the result of microbatch "
                f"{microbatch.index}"
            )
        place = microbatch.index, rank - self._layout.attention_ranks.start
        _, self.num_free_blocks[place], self.preemptions[place] = message.fields
        return read_tokens(message, self._generations)

    def _end_step(self, microbatch: Microbatch, rows: list[list[int]]) -> Progress:
        now = self._transport.clock()
        advanced, leaving = [], dict[int, bool]()  # by id: whether its attention worker knows
        for request_id, token, code in rows:
            if request_id in self._cancelled:
                if code:
                    leaving[request_id] = True
                continue
            generation = self._generations[request_id]
            advanced.append(generation)
            if append_token(generation, token, code, now):
                leaving[request_id] = code > 0
        finished = [self._generations[request_id] for request_id in leaving if request_id not in self._cancelled]
        for request_id in [request_id for request_id in self._cancelled if request_id in microbatch.resident]:
            self._cancelled.discard(request_id)
            self._generations[request_id].finish_reason = "abort"
            leaving.setdefault(request_id, False)
        self._leaving += [request_id for request_id, is_told in leaving.items() if not is_told]
        # Slots become free in the order in which their requests entered, as in the twin.
        residents = microbatch.resident if len(leaving) > 1 else leaving
        self.slots.end_step(microbatch, [request_id for request_id in residents if request_id in leaving])
        for request_id in leaving:
            del self._generations[request_id]
        return Progress(advanced, finished)
