"""The parts of a topology: its ranks, the forms of its messages, and the role of each rank."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

from live.backend import BackendLimits, BackendState
from live.engine import Progress
from live.generation import Generation
from live.loaded_model import DTYPES, Models, ModelSource
from live.models.config import ModelConfig
from live.topologies.transport import MAX_END_TOKENS, MOST_LOGPROBS, Forms, Message, Role, Transport

OnProgress: TypeAlias = Callable[[Progress], None]
"""Called with what each step has changed."""


class Worker(Protocol):
    """A worker of a topology, whose life is a role."""

    def run(self) -> Role: ...


MakeWorker: TypeAlias = Callable[[Transport], Worker]
"""Makes a worker, once its model has been loaded."""


class FrontRole(ABC):
    """The role of rank 0, which queues calls until the role takes them; from any thread, which then wakes the role.

    `gives`: the workers and their verb, for messages ("a bundle gives"). `max_model_len`: of prompt and output
    together.
    """

    def __init__(self, gives: str, max_model_len: int, transport: Transport, on_progress: OnProgress) -> None:
        self._gives = gives
        self._max_model_len = max_model_len
        self._transport = transport
        self._on_progress = on_progress
        self._generations: dict[int, Generation] = {}
        self._arriving: deque[Generation] = deque()
        self._aborting: deque[int] = deque()
        self._stopping = False

    @abstractmethod
    def state(self) -> BackendState:
        """The present state, for metrics."""

    @abstractmethod
    def run(self) -> Role:
        """The role."""

    def check(self, generation: Generation) -> None:
        """Raise a `ValueError` for a request that is too long, or for other than tokens and log-probabilities."""
        request = generation.request
        tokens = request.prompt_tokens + request.max_tokens
        if request.task != "generate" or generation.prompt_logprobs >= 0:
            expected = "expected output tokens to be wanted, and their log-probabilities at most"
            raise ValueError(f"request {request.id}: {expected}: {self._gives} nothing else")
        if generation.logprobs > MOST_LOGPROBS:
            raise ValueError(f"request {request.id}: expected at most {MOST_LOGPROBS} log-probabilities of a token")
        if not 1 <= request.prompt_tokens <= tokens <= self._max_model_len:
            raise ValueError(
                f"request {request.id}: expected a prompt, and at most {self._max_model_len} prompt and output tokens, "
                f"found {tokens}"
            )
        if len(generation.end_tokens) > MAX_END_TOKENS:
            raise ValueError(f"request {request.id}: expected at most {MAX_END_TOKENS} end tokens")

    def submit(self, generation: Generation) -> None:
        """Queue a request. Raises as `check`."""
        self.check(generation)
        generation.submitted = self._transport.clock()
        self._arriving.append(generation)

    def abort(self, request_id: int) -> None:
        """Abort a request; of one that is finished nothing happens."""
        self._aborting.append(request_id)

    def stop(self) -> None:
        """Abort all requests and end all workers. A second call changes nothing."""
        self._stopping = True

    def _take_calls(self) -> None:
        """Take the requests that have arrived, and abort others."""
        while self._arriving:
            generation = self._arriving.popleft()
            self._generations[generation.request.id] = generation
            self._enter(generation)
        if self._stopping:
            self._aborting.extend(self._generations)
        while self._aborting:
            aborted = self._generations.get(self._aborting.popleft())
            if aborted is not None and not aborted.finish_reason:
                self._abort(aborted)

    @abstractmethod
    def _enter(self, generation: Generation) -> None:
        """Take a new request."""

    @abstractmethod
    def _abort(self, generation: Generation) -> None:
        """Abort an unfinished request."""

    def _send_all(self, ranks: Iterable[int], kind: int) -> None:
        for rank in ranks:
            self._transport.send(rank, Message(kind))


@dataclass(frozen=True)
class Ranks(ABC):
    """Settings that all processes of a topology share. `model`: the only one, or the decoder that all share.

    `layout`: names of all ranks, such as "attention 0", and the forms of their messages.
    """

    model: ModelSource
    layout: Any

    @property
    def device(self) -> str:
        return self.model.device

    @property
    def names(self) -> list[str]:
        names: list[str] = self.layout.names
        return names

    def forms(self) -> Forms:
        forms: Forms = self.layout.forms(self.model.config(), DTYPES[self.model.dtype])
        return forms

    @property
    def fingerprint(self) -> str:
        """Changes with everything that all processes must agree on."""
        model = self.model
        settings = model.config(), self.layout, self._settings(), model.dtype, model.random, model.seed, model.rounding
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    @abstractmethod
    def load(self, rank: int, models: Models) -> MakeWorker:
        """Load the model of another rank than 0 (or raise `BadInput`); the result makes the worker."""

    def _settings(self) -> object:
        """Further settings that all processes must agree on."""
        return None


@dataclass(frozen=True)
class Deployment(Ranks):
    """One topology with its model. Its layout also has the `limits` of requests.

    `graphs`: steps run padded, and as CUDA graphs on a GPU; None: on GPUs alone.
    """

    graphs: bool | None = field(default=None, kw_only=True)

    @property
    def uses_graphs(self) -> bool:
        return self.device != "cpu" if self.graphs is None else self.graphs

    @property
    def models(self) -> tuple[str, ...]:
        """The names of several models that share the topology; empty where there is one."""
        return ()

    @cached_property
    def config(self) -> ModelConfig:
        return self.model.config()

    @property
    def limits(self) -> BackendLimits:
        limits: BackendLimits = self.layout.limits(self.config)
        return limits

    @abstractmethod
    def front(self, transport: Transport, on_progress: OnProgress) -> FrontRole:
        """The role of rank 0."""
