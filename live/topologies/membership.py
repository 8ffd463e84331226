"""The meeting of the processes of a topology, and which of them has failed.

Every rank has a connection to rank 0 and shows over it, twice a second, that it is alive. Facts go the same way, keys
with values as lines of JSON: rank 0 keeps the first value of each key and tells it to all. One of them is the first
failure: the peer that a rank waited for may itself only have waited for another.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from live.topologies.transport import TransportError
from workloads.errors import BadInput

BEAT_SECONDS, SILENT_SECONDS = 0.5, 2.5
"""Time between two signs of life of a rank, and time without one after which it counts as lost."""

VERDICT_SECONDS = 4.0
"""Time that a rank waits for rank 0 to say what has failed: long enough to notice that rank 0 is silent."""

POLL_SECONDS = 0.02

LINGER_SECONDS = 6.0
"""Time that rank 0 stays for those that learn of a failure later, at most."""

FAILED, LEFT = "failed", "left"
"""Keys of the first failure, and of what a rank says before it leaves."""


@dataclass(frozen=True)
class Address:
    """The address at which the processes of a topology meet."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, field: str = "--rendezvous") -> Address:
        """HOST:PORT, or `BadInput`."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 <= int(port) < 65536:
            raise BadInput("expected HOST:PORT", field=field, value=text)
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen_at(address: Address) -> socket.socket:
    """A socket that listens on this address alone; port 0: a free one. `BadInput` if taken or not this machine's."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=1024)
    except OSError as error:
        raise BadInput(
            f"expected a free address of this machine ({error.strerror})", field="--rendezvous", value=str(address)
        ) from None


class Membership:
    """One rank's place among the others. Every wait ends with a `TransportError` when a rank has failed or is lost.

    `fingerprint`: of what all ranks must agree on. `listener`: of rank 0, None for others. `watch`: called by `check`,
    and raises for what else can fail, such as a process that this one has started.
    """

    def __init__(
        self,
        address: Address,
        rank: int,
        names: Sequence[str],
        fingerprint: str,
        *,
        listener: socket.socket | None = None,
        join_seconds: float = 10.0,
    ) -> None:
        self.rank = rank
        self.names = list(names)
        self._fingerprint = fingerprint
        self._join_seconds = join_seconds
        self._deadline = time.monotonic() + join_seconds
        self._facts: dict[str, str] = {}
        self._peers: dict[int, socket.socket] = {}  # of rank 0 all that are there, of another rank 0 alone
        if listener is not None:
            address = Address(address.host, listener.getsockname()[1])
        else:
            self._peers[0] = self._call(address)
        self.meeting_point = address
        self.address = (listener or self._peers[0]).getsockname()[0]
        self.watch: Callable[[], None] = lambda: None
        self._on_failure: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._leaving = threading.Event()
        for peer in self._peers.values():
            _start(self._listen, peer, 0)
        _start(self._beat, listener)

    def name(self, rank: int) -> str:
        """A rank in a message to people."""
        return f"rank {rank} ({self.names[rank]})"

    def extend(self, seconds: float) -> None:
        """Give all ranks more time to come."""
        self._deadline = max(self._deadline, time.monotonic() + seconds)

    def gather(self) -> None:
        """Wait until every rank has come. Rank 0 decides when that takes too long."""
        self.publish(f"here/{self.rank}", self._fingerprint)
        for rank in range(len(self.names)):
            while f"here/{rank}" not in self._facts:
                if self.rank == 0 and time.monotonic() > self._deadline:
                    raise self.fail(f"{self.name(rank)} has not come within {self._join_seconds:g} s")
                self._pause()
            if self._facts[f"here/{rank}"] != self._fingerprint:
                raise self.fail(f"{self.name(rank)} was started with other settings than {self.name(self.rank)}")

    def ready(self) -> None:
        """Wait until every rank has called this: its model is loaded."""
        self.publish(f"ready/{self.rank}", "")
        for rank in range(len(self.names)):
            self.published(f"ready/{rank}")

    def publish(self, key: str, value: str) -> None:
        """Tell all ranks something for which they ask by `published`."""
        if self.rank == 0:
            self._enter(key, value)
        else:
            self._tell_all(key, value)

    def published(self, key: str) -> str:
        """Wait for what a rank publishes."""
        while key not in self._facts:
            self._pause()
        return self._facts[key]

    def on_failure(self, action: Callable[[], None]) -> None:
        """Let something be called, from any thread, when a rank has failed: it should end waits for messages."""
        with self._changed:
            self._on_failure.append(action)
            has_failed = FAILED in self._facts
        if has_failed:
            action()

    def check(self) -> None:
        """Raise the first failure if a rank has failed or is lost; for a rank that waits for no message."""
        if FAILED in self._facts:
            raise TransportError(self._facts[FAILED])
        try:
            self.watch()
        except TransportError as error:
            raise self.fail(str(error)) from None

    def fail(self, text: str) -> TransportError:
        """An error with the first failure of any rank: this one, unless there is another."""
        if FAILED not in self._facts:
            self.publish(FAILED, text)
            with self._changed:
                self._changed.wait_for(lambda: FAILED in self._facts, VERDICT_SECONDS)
            self._enter(FAILED, text)
        return TransportError(self._facts[FAILED])

    def blame(self, peer: int, reason: str) -> TransportError:
        """The failure behind a wait for a peer: as `fail`."""
        return self.fail(f"{self.name(peer)} {reason}")

    def close(self) -> None:
        """Leave. Rank 0 waits for a moment until the others have left, so that they learn what has failed."""
        with self._changed:
            if self.rank == 0:
                self._changed.wait_for(lambda: not self._peers, LINGER_SECONDS)
            else:
                self._tell_all(LEFT, "")
            self._leaving.set()
            for peer in self._peers.values():
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)

    def _call(self, address: Address) -> socket.socket:
        while True:
            try:
                return socket.create_connection((address.host, address.port), 1.0)
            except OSError:
                if time.monotonic() > self._deadline:
                    raise TransportError(
                        f"{self.name(0)} has not come to {address} within {self._join_seconds:g} s"
                    ) from None
                time.sleep(POLL_SECONDS)

    def _pause(self) -> None:
        """Wait for another fact, for a moment; raises as `check`."""
        self.check()
        with self._changed:
            self._changed.wait(POLL_SECONDS)

    def _enter(self, key: str, value: str) -> None:
        """Note a fact if its key is new. Rank 0 tells it to all."""
        with self._changed:
            if key in self._facts:
                return
            self._facts[key] = value
            self._changed.notify_all()
            if self.rank == 0:
                self._tell_all(key, value)
            actions = list(self._on_failure) if key == FAILED else []
        for action in actions:
            action()

    def _tell_all(self, *fact: str) -> None:
        with self._changed:
            for peer in self._peers.values():
                _send(peer, fact)

    # -- in threads --------------------------------------------------------------------------------------------------

    def _beat(self, listener: socket.socket | None) -> None:
        """Show that this rank is alive until it leaves; rank 0 takes callers meanwhile."""
        if listener is not None:
            listener.settimeout(BEAT_SECONDS)
        while not self._leaving.wait(BEAT_SECONDS if listener is None else 0.0):
            with contextlib.suppress(OSError):
                if listener is not None:
                    _start(self._listen, listener.accept()[0], None)
            self._tell_all()

    def _listen(self, peer: socket.socket, rank: int | None) -> None:
        """Take what another rank says. `rank`: None for a caller that has not said who it is."""
        reason = "has ended"
        try:
            with peer, peer.makefile("rb") as lines:
                peer.settimeout(SILENT_SECONDS)
                for key, value in filter(None, map(json.loads, lines)):
                    if rank is None:
                        rank = self._welcome(peer, key)
                    if key == LEFT:
                        reason = ""
                        break
                    self._enter(str(key), str(value))
        except TimeoutError:
            reason = "does not answer"
        except (OSError, ValueError, TypeError):
            pass  # also of callers that say something else
        if rank is None:
            return
        with self._changed:
            self._peers.pop(rank, None)
            self._changed.notify_all()
        if reason and not self._leaving.is_set():
            self._enter(FAILED, f"{self.name(rank)} {reason}")

    def _welcome(self, peer: socket.socket, key: str) -> int:
        rank = [f"here/{rank}" for rank in range(len(self.names))].index(key)
        with self._changed:
            if key in self._facts or rank == 0:
                raise ValueError(key)
            self._peers[rank] = peer
            for fact in self._facts.items():
                _send(peer, fact)
        return rank


def _start(target: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, name="membership", daemon=True).start()


def _send(peer: socket.socket, fact: tuple[str, ...]) -> None:
    with contextlib.suppress(OSError):
        peer.sendall(json.dumps(fact).encode() + b"\n")
