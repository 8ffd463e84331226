"""Attention instances that advance on their own: each goes on to its next microbatch, and only the FFN waits for all.

Every attention instance is a server with a link of its own to the FFN. It takes the microbatches in the order in which
they come back, and sends its part as soon as that is computed. The FFN begins when the parts of all instances that have
requests in the microbatch are there, and returns the result to all of them at once.

The FFN serves the microbatches in the order in which they set out (`in_order`), as one that receives from named sources
does. Then no microbatch overtakes at any server, so all waiting times are known when it sets out, and `fast_forward`
needs one event a pass, as in lockstep. A `first_ready` FFN takes whichever microbatch is complete. That makes a
difference only where some instances have no requests in a microbatch, and is simulated state by state.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from simpy.events import Event

from latency_models.pass_latency import PassLatency
from schedulers.bundle_slots import FfnOrder, Microbatch
from twin.afd.stages import Stage, Waits, ffn_time, transfer_time
from twin.environment import Environment


@dataclass(slots=True)
class _Part:
    """An instance's part of a microbatch step: its durations, when it last reached the FFN, and how long it waited."""

    instance: int
    attention: float
    transfer: float
    arrived: float = 0.0
    attention_wait: float = 0.0
    ffn_wait: float = 0.0


class IndependentSteps:
    """The servers of a bundle whose attention instances advance on their own.

    Args:
        instances: attention instances, x.
        latency: of one pass.
        layers: passes that make a decode step.
        ffn_order: which microbatch the FFN takes next.
    """

    def __init__(
        self,
        env: Environment,
        instances: int,
        latency: PassLatency,
        ffn_instances: int,
        layers: int,
        ffn_order: FfnOrder,
        *,
        fast_forward: bool,
    ) -> None:
        self.env, self.latency = env, latency
        self._ffn_instances, self._layers, self._in_order = ffn_instances, layers, ffn_order == "in_order"
        self._fast_forward = fast_forward and self._in_order
        self.attention = [Stage(env) for _ in range(instances)]
        self.outward = [Stage(env) for _ in range(instances)]
        self.ffn, self.homeward = Stage(env), Stage(env)

    def run(self, microbatch: Microbatch) -> Generator[Event, None, Waits]:
        """Take a microbatch through every layer; waits are means over the instances that have requests in it."""
        go_round = self._reserve_round if self._fast_forward else self._walk_round
        (alpha, beta), latency = self.latency.attention, self.latency
        parts = [
            _Part(instance, alpha * load + beta, transfer_time(latency, active))
            for instance, (load, active) in enumerate(zip(microbatch.loads, microbatch.active, strict=True))
            if active
        ]
        ffn = ffn_time(latency, microbatch.requests, self._ffn_instances)
        transfer = transfer_time(latency, max(microbatch.active))
        way_back_wait = 0.0
        for _ in range(self._layers):
            way_back_wait += yield from go_round(parts, ffn, transfer)
        attention_wait = sum(part.attention_wait for part in parts) / len(parts)
        return attention_wait + way_back_wait, sum(part.ffn_wait for part in parts) / len(parts)

    def _reserve_round(self, parts: list[_Part], ffn: float, transfer: float) -> Generator[Event, None, float]:
        """One pass as one event; returns the wait for the way back."""
        env, attention, outward = self.env, self.attention, self.outward
        ready = env.now
        complete = 0.0
        for part in parts:
            begun = attention[part.instance].reserve(ready, part.attention)
            attended = begun + part.attention
            sent = outward[part.instance].reserve(attended, part.transfer)
            part.arrived = arrived = sent + part.transfer
            part.attention_wait += begun - ready
            part.ffn_wait += sent - attended
            if arrived > complete:
                complete = arrived
        taken = self.ffn.reserve(complete, ffn)
        for part in parts:
            part.ffn_wait += taken - part.arrived
        done = taken + ffn
        returned = self.homeward.reserve(done, transfer)
        yield env.at(returned + transfer)
        return returned - done

    def _walk_round(self, parts: list[_Part], ffn: float, transfer: float) -> Generator[Event, None, float]:
        """One pass with an event for each state: the reference for the fast path."""
        env, stage = self.env, self.ffn
        # A place in the FFN's queue: taken when the microbatch sets out, or when it is complete.
        place = stage.queue.request() if self._in_order else None
        yield env.all_of([env.process(self._attend(part)) for part in parts])
        turn = place or stage.queue.request()
        yield turn
        for part in parts:
            part.ffn_wait += env.now - part.arrived
        yield env.timeout(ffn)
        stage.queue.release(turn)
        return (yield from self.homeward.serve(transfer))

    def _attend(self, part: _Part) -> Generator[Event, None, None]:
        """One instance's attention and its way to the FFN."""
        part.attention_wait += yield from self.attention[part.instance].serve(part.attention)
        part.ffn_wait += yield from self.outward[part.instance].serve(part.transfer)
        part.arrived = self.env.now
