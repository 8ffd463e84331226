"""The parts of a topology: its ranks, the forms of its messages, and the role of each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from live.backend import BackendLimits, BackendState
from live.engine import Progress
from live.generation import Generation
from live.loaded_model import Models
from live.models.config import ModelConfig
from live.topologies.transport import Forms, Role, Transport

MakeRole: TypeAlias = Callable[[Transport], Role]
"""Makes a worker's role, once its model has been loaded."""


class FrontRole(Protocol):
    """The role of rank 0, which takes requests. Its methods may be called while it runs in another thread."""

    def check(self, generation: Generation) -> None:
        """Refuse what the topology cannot run.

        Raises:
            ValueError: a request that it cannot run.
        """
        ...

    def submit(self, generation: Generation) -> None:
        """Queue a request. Raises as `check`."""
        ...

    def abort(self, request_id: int) -> None:
        """Abort a request; of one that is finished nothing happens."""
        ...

    def stop(self) -> None:
        """Abort all requests and end all workers."""
        ...

    def state(self) -> BackendState:
        """The present state."""
        ...

    def run(self) -> Role:
        """The role."""
        ...


class Deployment(Protocol):
    """One topology with its model, the same in all of its processes."""

    @property
    def names(self) -> list[str]:
        """A name for each rank, such as "attention 0"."""
        ...

    @property
    def models(self) -> tuple[str, ...]:
        """The names of several models that share the topology; empty where there is one."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes with everything that all processes must agree on."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        ...

    @property
    def limits(self) -> BackendLimits:
        """The sizes that limit requests."""
        ...

    def forms(self) -> Forms:
        """The forms of the messages."""
        ...

    def front(self, transport: Transport, on_progress: Callable[[Progress], None]) -> FrontRole:
        """The role of rank 0."""
        ...

    @property
    def device(self) -> str:
        """The kind of device that workers compute on."""
        ...

    def load(self, rank: int, models: Models) -> MakeRole:
        """Load the model of another rank; the result makes its role.

        Raises:
            BadInput: the model cannot be loaded.
        """
        ...
