"""The clients, which send requests one by one or in sessions, in an open or a closed loop.

An open loop sends at given times, a closed loop when the previous answer is complete. A turn of a session is sent when
the turn before it is answered and its pause is over. In an open loop, sessions arrive at given times; in a closed loop,
users begin a session when their last one has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from math import inf
from typing import TYPE_CHECKING

from simpy.events import Event

from twin.environment import Alarm, Environment, Priority
from twin.serving.records.requests import RequestRecord, SessionLog, SessionRecord
from twin.serving.system.system import System
from workloads.request import Request

if TYPE_CHECKING:
    from workloads.sessions import Prompt, Round, Session


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
        """A time, in seconds, before which at most `requests` more requests arrive; infinity after the last."""
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
        for _ in range(concurrency):
            env.process(self._client())

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


class SessionClients:
    """Sends the requests of sessions.

    Args:
        users: each begins a session `pause()` seconds after the end of its last one, before the time `until`; None:
            sessions begin at their arrival times, independently of each other.

    Attributes:
        log: the finished sessions. sent: number of requests that were sent. until: the time after which none is sent.
    """

    def __init__(
        self,
        env: Environment,
        system: System,
        sessions: Iterator[Session],
        log: SessionLog,
        users: int | None = None,
        pause: Callable[[], float] = lambda: 0.0,
        until: float = inf,
    ) -> None:
        self.log = log
        self.until = until
        self._env = env
        self._system = system
        self._sessions = sessions
        self._pause = pause
        self.sent = 0
        self._unanswered: dict[int, tuple[SessionRecord, Prompt, Event]] = {}  # by request id
        if users is None:
            env.process(self._arrive())
        for _ in range(users or 0):
            env.process(self._user())

    def _arrive(self) -> Generator[Event, object, None]:
        """Begin each session when it arrives."""
        env = self._env
        for session in self._sessions:
            yield env.at(session.arrival, Priority.ARRIVAL)
            env.process(self._hold(session, late=False))

    def _user(self) -> Generator[Event, object, None]:
        """Hold one session after the other until there are no more."""
        env = self._env
        yield env.at(0.0, Priority.ARRIVAL)
        for session in self._sessions:
            if env.now >= self.until:
                return
            yield from self._hold(session, late=env.now > 0)
            yield env.at(env.now + self._pause(), Priority.LATE)

    def finished(self, record: RequestRecord) -> None:
        """Count an answer, and wake its session when its round is answered."""
        session, prompt, answered = self._unanswered.pop(record.request.id)
        if session.answer(self._env.now, prompt, record.cached_tokens):
            answered.succeed()

    def _hold(self, session: Session, late: bool) -> Generator[Event, object, None]:
        """Send the rounds of a session that begins now.

        `late`: the step ends of this instant are over (see `Priority.LATE`).
        """
        record = SessionRecord(session.id, self._env.now)
        yield from self._send_rounds(session, record, session.rounds, late)
        self.log.add(record, self._env.now)

    def _sub_agent(
        self, session: Session, main: SessionRecord, rounds: Iterator[Round]
    ) -> Generator[Event, object, None]:
        """Send the rounds of a sub-agent that is started by the answer of this instant."""
        env = self._env
        yield env.at(env.now, Priority.LATE)
        record = SessionRecord(session.id, env.now)
        yield from self._send_rounds(session, record, rounds, late=True)
        main.add_sub_agent(record)

    def _send_rounds(
        self, session: Session, record: SessionRecord, rounds: Iterator[Round], late: bool
    ) -> Generator[Event, object, None]:
        """Send rounds, each after the answers of the round before and after the sub-agents that it started."""
        env = self._env
        for round in rounds:
            if record.turn:
                yield env.at(max(env.now + round.pause, round.not_before), Priority.LATE)
                late = True
            if env.now >= self.until:
                return
            record.send(env.now, len(round.prompts))
            answered = env.event()
            for prompt in round.prompts:
                request = session.request(prompt, self.sent, env.now)
                self._unanswered[self.sent] = record, prompt, answered
                self.sent += 1
                self.log.sent(record)
                self._system.submit(RequestRecord(request, prompt.answer_tokens), late=late)
            yield answered
            if round.agents:
                yield env.all_of([env.process(self._sub_agent(session, record, agent)) for agent in round.agents])
