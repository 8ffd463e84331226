"""The clients of sessions: a turn is sent when the turn before it is answered and its pause is over.

In an open loop, sessions arrive at given times. In a closed loop, users begin a session when their last one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from math import inf
from typing import TYPE_CHECKING

from simpy.events import Event

from twin.environment import Environment, Priority
from twin.serving.records.requests import RequestRecord
from twin.serving.records.session_log import SessionLog, SessionRecord
from twin.serving.system.system import System

if TYPE_CHECKING:
    from workloads.sessions import Prompt, Round, Session


class SessionClients:
    """Sends the requests of sessions. A subclass says when sessions begin.

    Attributes:
        log: the finished sessions. sent: number of requests that were sent. until: the time after which none is sent.
    """

    def __init__(
        self, env: Environment, system: System, sessions: Iterator[Session], log: SessionLog, until: float = inf
    ) -> None:
        self.log = log
        self.until = until
        self._env = env
        self._system = system
        self._sessions = sessions
        self.sent = 0
        self._unanswered: dict[int, tuple[SessionRecord, Prompt, Event]] = {}  # by request id

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


class OpenSessions(SessionClients):
    """Sessions begin at their arrival times, independently of each other."""

    def __init__(self, env: Environment, system: System, sessions: Iterator[Session], log: SessionLog) -> None:
        super().__init__(env, system, sessions, log)
        self.process = env.process(self._run())

    def _run(self) -> Generator[Event, object, None]:
        env = self._env
        for session in self._sessions:
            yield env.at(session.arrival, Priority.ARRIVAL)
            env.process(self._hold(session, late=False))


class ClosedSessions(SessionClients):
    """`users` users, each of whom begins a session `pause()` seconds after the end of the last one."""

    def __init__(
        self,
        env: Environment,
        system: System,
        sessions: Iterator[Session],
        log: SessionLog,
        users: int,
        pause: Callable[[], float],
        until: float = inf,
    ) -> None:
        super().__init__(env, system, sessions, log, until)
        self._pause = pause
        self.processes = [env.process(self._user()) for _ in range(users)]

    def _user(self) -> Generator[Event, object, None]:
        """Hold one session after the other until there are no more."""
        env = self._env
        yield env.at(0.0, Priority.ARRIVAL)
        for session in self._sessions:
            if env.now >= self.until:
                return
            yield from self._hold(session, late=env.now > 0)
            yield env.at(env.now + self._pause(), Priority.LATE)
