"""Attention instances in lockstep: all compute the same microbatch, and its attention ends with the slowest of them.

Attention, the two directions of the link, and the FFN each serve one microbatch at a time, in order of arrival.

All four serve in order, and every microbatch visits them in the same order, so none overtakes another. When a
microbatch sets out, all its waiting times are therefore known. With `fast_forward` one event carries it round; without
it each state is an event of its own. Both give the same records to the last bit (`tests/parity`).
"""

from __future__ import annotations

from collections.abc import Generator

from simpy.events import Event

from latency_models.pass_latency import PassLatency
from schedulers.bundle_slots import Microbatch
from twin.afd.stages import Stage, Waits, ffn_time, transfer_time
from twin.environment import Environment


class LockstepSteps:
    """The four stages of a bundle whose attention instances advance in lockstep.

    Args:
        latency: of one pass.
        layers: passes that make a decode step.
    """

    def __init__(
        self, env: Environment, latency: PassLatency, ffn_instances: int, layers: int, *, fast_forward: bool
    ) -> None:
        self.env, self.latency = env, latency
        self._ffn_instances, self._layers, self._fast_forward = ffn_instances, layers, fast_forward
        self.attention, self.outward, self.ffn, self.homeward = (Stage(env) for _ in range(4))

    def run(self, microbatch: Microbatch) -> Generator[Event, None, Waits]:
        """Take a microbatch through every layer."""
        go_round = self._reserve_round if self._fast_forward else self._walk_round
        alpha, beta = self.latency.attention
        attention = alpha * max(microbatch.loads) + beta
        transfer = transfer_time(self.latency, max(microbatch.active))
        ffn = ffn_time(self.latency, microbatch.requests, self._ffn_instances)
        attention_wait = ffn_wait = 0.0
        for _ in range(self._layers):
            waits = yield from go_round(attention, transfer, ffn)
            attention_wait += waits[0]
            ffn_wait += waits[1]
        return attention_wait, ffn_wait

    def _reserve_round(self, attention: float, transfer: float, ffn: float) -> Generator[Event, None, Waits]:
        """One pass as one event: all stages are reserved at once, which is exact because no microbatch overtakes."""
        env = self.env
        ready = env.now
        begun = self.attention.reserve(ready, attention)
        attended = begun + attention
        sent = self.outward.reserve(attended, transfer)
        arrived = sent + transfer
        taken = self.ffn.reserve(arrived, ffn)
        done = taken + ffn
        returned = self.homeward.reserve(done, transfer)
        yield env.at(returned + transfer)
        return (begun - ready) + (returned - done), (sent - attended) + (taken - arrived)

    def _walk_round(self, attention: float, transfer: float, ffn: float) -> Generator[Event, None, Waits]:
        """One pass with an event for each state: the reference for the fast path."""
        for_attention = yield from self.attention.serve(attention)
        for_link = yield from self.outward.serve(transfer)
        for_ffn = yield from self.ffn.serve(ffn)
        for_way_back = yield from self.homeward.serve(transfer)
        return for_attention + for_way_back, for_link + for_ffn
