"""The clients: an open loop sends at given times, a closed loop when the previous answer is complete."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from simpy.events import Event

from twin.environment import Environment, Priority
from twin.serving.records import RequestRecord
from twin.serving.system import System
from workloads.request import Request


class OpenLoop:
    """Sends each request at its arrival time, independently of the answers."""

    def __init__(self, env: Environment, system: System, requests: Iterator[tuple[Request, int]]) -> None:
        self._env, self._system, self._requests = env, system, requests
        self.process = env.process(self._run())

    def _run(self) -> Generator[Event, object, None]:
        at, submit, priority = self._env.at, self._system.submit, Priority.ARRIVAL
        for request, answer_tokens in self._requests:
            yield at(request.arrival, priority)
            submit(RequestRecord(request, answer_tokens))

    def finished(self, record: RequestRecord) -> None:
        """Do nothing: the next request does not depend on answers."""


class ClosedLoop:
    """`concurrency` clients, each of which sends its next request `think()` seconds after its previous answer."""

    def __init__(
        self,
        env: Environment,
        system: System,
        requests: Iterator[tuple[Request, int]],
        concurrency: int,
        think: Callable[[], float],
    ) -> None:
        self._env, self._system, self._requests, self._think = env, system, requests, think
        self._answered: dict[int, Event] = {}  # by request id
        self.processes = [env.process(self._client()) for _ in range(concurrency)]

    def _client(self) -> Generator[Event, object, None]:
        """Send a request, wait for its answer, think, and send the next until there are no more requests."""
        env = self._env
        yield env.at(0.0, Priority.ARRIVAL)
        for request, answer_tokens in self._requests:
            answered = self._answered[request.id] = env.event()
            self._system.submit(RequestRecord(_sent_at(env.now, request), answer_tokens), late=env.now > 0)
            yield answered
            yield env.at(env.now + self._think(), Priority.LATE)

    def finished(self, record: RequestRecord) -> None:
        """Wake the client that waits for this answer."""
        self._answered.pop(record.request.id).succeed()


def _sent_at(now: float, request: Request) -> Request:
    return Request(
        request.id,
        now,
        request.prompt_tokens,
        request.max_tokens,
        request.model,
        request.prefix_blocks,
        request.task,
        request.priority,
    )
