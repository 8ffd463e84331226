"""The error of an executor that ends before its tasks do."""

from __future__ import annotations

from workloads.errors import TwinError


class ExecutorLost(TwinError):
    """The executor is gone, or a task ends every worker that runs it. Results that have come back by then are kept."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; the same command, with any executor, goes on from the results that are kept")
