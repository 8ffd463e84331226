"""The clients: an open loop sends at given times, a closed loop when the previous answer is complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from math import inf

from simpy.events import Event

from twin.environment import Alarm, Environment, Priority
from twin.serving.records.requests import RequestRecord
from twin.serving.system.system import System
from workloads.request import Request


class OpenLoop:
    """Sends each request at its arrival time, independently of the answers.

    Args:
        ahead: requests that are drawn before they arrive, at least 1.
    """

    def __init__(
        self, env: Environment, system: System, requests: Iterator[tuple[Request, int]], ahead: int = 1
    ) -> None:
        self._env = env
        self._system = system
        self._requests = requests
        self._alarm = Alarm(Priority.ARRIVAL, self._send)
        self._coming: deque[RequestRecord] = deque()
        self._is_last = False  # whether the requests that come are all that are left
        for _ in range(ahead):
            self._draw()
        self._await_next()

    def time_after(self, requests: int) -> float:
        next_request = self._coming
        if requests < len(next_request):
            return next_request[requests].request.arrival
        return inf if self._is_last else next_request[-1].request.arrival

    def _draw(self) -> None:
        """Draw one more request, if there is one."""
        entry = next(self._requests, None)
        if entry is None:
            self._is_last = True
        else:
            self._coming.append(RequestRecord(entry[0], entry[1]))

    def _await_next(self) -> None:
        """Set the alarm to the arrival of the next request, if there is one."""
        if self._coming:
            self._env.set(self._alarm, self._coming[0].request.arrival)

    def _send(self, now: float) -> None:
        record = self._coming.popleft()
        self._draw()
        self._system.submit(record)
        self._await_next()

    def finished(self, record: RequestRecord) -> None:
        """Do nothing: the next request does not depend on answers."""


class PartwiseLoop:
    """An open loop whose requests are handed in part by part: in between, the simulation stands still."""

    def __init__(self, env: Environment, system: System) -> None:
        self._env = env
        self._system = system
        self._alarm = Alarm(Priority.ARRIVAL, self._never)

    def play(self, requests: Iterable[tuple[Request, int]], until: float) -> None:
        """Send requests at their arrival times, and run up to the time `until`, before which no others arrive."""
        env, system, alarm = self._env, self._system, self._alarm
        for request, answer_tokens in requests:
            env.run_to(alarm, request.arrival)
            system.submit(RequestRecord(request, answer_tokens))
        env.run_to(alarm, until)

    def _never(self, now: float) -> None:
        raise AssertionError("the alarm marks how far to run, and does not ring")


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
        self._env = env
        self._system = system
        self._requests = requests
        self._think = think
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
        request.session,
        request.tenant,
        request.service_class,
        request.ttft_goal,
    )
