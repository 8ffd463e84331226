"""Classes for vLLM's `--scheduler-cls`; those for engines with async scheduling, vLLM's default, begin with `Async`."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from live.vllm.policies import RunsOneShots, SizesChunks
from live.vllm.step_log import RecordsSteps


class RecordingScheduler(RecordsSteps, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, which writes a step log."""


class AsyncRecordingScheduler(RecordsSteps, AsyncScheduler):  # type: ignore[misc]
    """The same for async scheduling."""


class PolicyScheduler(RecordsSteps, SizesChunks, RunsOneShots, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with chunk policy, one-shot lane and step log, as far as settings name them."""


class AsyncPolicyScheduler(RecordsSteps, SizesChunks, RunsOneShots, AsyncScheduler):  # type: ignore[misc]
    """The same for async scheduling."""
