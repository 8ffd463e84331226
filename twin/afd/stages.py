"""Stages of a bundle's pipeline: servers that take one microbatch at a time, in order of arrival."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import simpy
from simpy.events import Event

from latency_models.pass_latency import PassLatency
from schedulers.bundle_slots import Microbatch
from twin.environment import Environment

Waits = tuple[float, float]
"""Time that a microbatch step waited for attention and for the FFN, links included, over all layers."""


class StepRunner(Protocol):
    """Takes one decode step of a microbatch through the stages."""

    def run(self, microbatch: Microbatch) -> Generator[Event, None, Waits]:
        """Take a microbatch with requests through every layer; ends when its step does."""
        ...


class Stage:
    """A server that takes one microbatch at a time, in order of arrival: attention, FFN, or one direction of a
    link."""

    __slots__ = ("env", "free_at", "queue")

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.free_at = 0.0
        self.queue = simpy.Resource(env)  # used step by step only

    def reserve(self, ready: float, duration: float) -> float:
        """Serve the microbatch that is ready next; returns the time at which service begins."""
        free_at = self.free_at
        start = free_at if free_at > ready else ready
        self.free_at = start + duration
        return start

    def serve(self, duration: float) -> Generator[Event, None, float]:
        """Queue, be served, leave; returns the time spent in the queue."""
        asked = self.env.now
        with self.queue.request() as turn:
            yield turn
            waited = self.env.now - asked
            yield self.env.timeout(duration)
        return waited


def transfer_time(latency: PassLatency, requests: int) -> float:
    """One direction of the link for the requests of one attention instance."""
    alpha, beta = latency.communication
    return (alpha * requests + beta) / 2


def ffn_time(latency: PassLatency, requests: int, ffn_instances: int) -> float:
    """The FFN for all requests of a microbatch, shared evenly by the FFN instances."""
    alpha, beta = latency.ffn
    return alpha * (requests / ffn_instances) + beta
