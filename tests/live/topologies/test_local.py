"""Roles of one process whose kernels run on a device: others go on meanwhile."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from live.topologies.local import LocalNetwork  # noqa: E402
from live.topologies.transport import Computing, Role  # noqa: E402


def computing(name: str, log: list[str], done: bool) -> Role:
    """Launches twice, each time waits for its kernels, and collects their output."""
    for _ in range(2):
        log.append(f"{name} launches")
        yield Computing(lambda: done, lambda: log.append(f"{name} is waited for"))
        log.append(f"{name} collects")


def run(**done: bool) -> list[str]:
    log: list[str] = []
    network = LocalNetwork({})
    network.start({rank: computing(name, log, is_done) for rank, (name, is_done) in enumerate(done.items())})
    network.run()
    assert network.ended
    return log


def test_all_launch_before_the_host_waits() -> None:
    assert run(a=False, b=False)[:4] == ["a launches", "b launches", "a is waited for", "a collects"]


def test_kernels_that_are_done_are_not_waited_for() -> None:
    """Role b goes on twice while a's kernels run."""
    assert run(a=False, b=True) == [
        "a launches", "b launches", "b collects", "b launches", "b collects",
        "a is waited for", "a collects", "a launches", "a is waited for", "a collects",
    ]  # fmt: skip
