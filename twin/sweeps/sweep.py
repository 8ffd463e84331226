"""A sweep: configurations of a scenario, each simulated in runs that do not depend on one another."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from scenarios.overrides import Settings
from twin.executors.executor import Executor

if TYPE_CHECKING:
    from workloads.trace import Trace

Document = dict[str, Any]


class Keyed(Protocol):
    """One run to make."""

    @property
    def key(self) -> str:
        """Its name in a run folder."""


Plan = TypeVar("Plan")
Task = TypeVar("Task", bound=Keyed)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Case(Generic[Plan]):
    """One configuration: the settings that set it apart, and its plan."""

    settings: Settings
    plan: Plan


class Sweep(ABC, Generic[Task, Result]):
    """Checked configurations and their runs. Nothing is simulated until `run`."""

    @property
    @abstractmethod
    def tasks(self) -> Sequence[Task]:
        """Every run, in the order in which they start."""

    @abstractmethod
    def inputs(self) -> Document:
        """The entries of a run's manifest."""

    @abstractmethod
    def fingerprint(self, version: str) -> str:
        """A digest of `version` and of everything that a result depends on."""

    @abstractmethod
    def label(self, task: Task) -> str:
        """A run's configuration in words, for progress."""

    @abstractmethod
    def summarise(self, documents: dict[str, Document]) -> Document:
        """The document of the whole sweep."""

    @abstractmethod
    def work(self) -> Callable[[Task], Result]:
        """The function that makes a run, perhaps in another process."""

    @abstractmethod
    def keep_result(self, task: Task, result: Result, folder: Path | None) -> Document:
        """The point of a run for `points.jsonl`; files of the run are written to `folder`."""

    def prepare_summary(self) -> None:
        """Compute parts of the summary that need no results, while workers simulate."""

    def run(
        self,
        documents: dict[str, Document],
        keep: Callable[[str, Document], None],
        executor: Executor,
        meanwhile: Callable[[], object] = lambda: None,
        folder: Path | None = None,
    ) -> Iterator[Task]:
        """Make the missing runs; `keep` each and add it to `documents`, then yield its task."""
        missing = [task for task in self.tasks if task.key not in documents]
        with executor.each_as_done(self.work(), missing) as results:
            self.prepare_summary()
            meanwhile()
            for task, result in results:
                point = self.keep_result(task, result, folder)
                keep(task.key, point)
                documents[task.key] = point
                yield task


class TraceFiles:
    """Traces of a scenario's configurations. Each file is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._traces: dict[str, Trace | None] = {}

    def read(self, workload: Any) -> Trace | None:
        """The trace that a `workload` section names, if it names one."""
        spec = workload.trace
        key = json.dumps(None if spec is None else [spec.path, spec.format])
        if key not in self._traces:
            self._traces[key] = workload.read_trace(self._folder)
        return self._traces[key]
