"""Options that several commands have: each field is a flag, and its docstring is the flag's help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from twin.executors.executor import ExecutorChoice

FLAG = Parameter(negative=())

Flag = Annotated[bool, FLAG]
Json = Annotated[bool, Parameter(negative=(), help="Print one JSON document on stdout and nothing else there.")]
Fresh = Annotated[bool, Parameter(negative=(), help="Start anew even if an unfinished run of the same inputs exists.")]
Settings = Annotated[list[str] | None, Parameter(name="--set", negative=())]
Output = Annotated[Path, Parameter(name=["--output", "-o"])]
FileOrStdout = Annotated[Path | None, Parameter(name=["--output", "-o"], help="File to write; default: print it.")]


@Parameter(name="*")
@dataclass(frozen=True)
class RunOptions:
    """The run folder and what is printed."""

    json: Json = False

    runs: Path = Path("runs")
    """Parent of the run folders."""

    no_figures: Flag = False
    """Leave out figures and the HTML report."""


@Parameter(name="*")
@dataclass(frozen=True)
class ExecutorOptions:
    """Processes or cluster of the runs."""

    jobs: int | None = None
    """Processes; default: one for each core."""

    executor: str = "local"
    """Place of the runs: local, dask (workers of its own), dask://host:port (a running scheduler) or ray."""

    def choose(self) -> ExecutorChoice:
        """The executor, which is not started yet."""
        from twin.api.arguments import require_at_least
        from twin.executors.executor import choose_executor

        require_at_least("--jobs", self.jobs, 1)
        return choose_executor(self.executor, self.jobs)


@Parameter(name="*")
@dataclass(frozen=True)
class RepetitionOptions:
    """Runs of each configuration of a serving system."""

    replications: int = 1
    """Runs with other seeds of the same workload; several give every metric a 95 % interval (serving systems)."""

    draws: int | None = None
    """Runs with what is not known of step times and memory drawn, 10 or more; default: as many as replications if
several (serving systems)."""

    @property
    def several(self) -> bool:
        """True if a configuration may have more than one run."""
        return self.replications > 1 or bool(self.draws)

    def check(self) -> None:
        """Refuse numbers that are too small."""
        from twin.api.arguments import check_counts

        check_counts(jobs=None, replications=self.replications, draws=self.draws)
