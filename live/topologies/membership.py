"""The meeting of the processes of a topology, and which of them has failed.

Rank 0 keeps a key-value store at the rendezvous address. Every rank enters itself there, and then shows every second
that it is alive. When a wait fails, the store tells which rank is the cause: the peer that one waited for may itself
only have waited for another.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from live.topologies.transport import TransportError
from workloads.errors import BadInput

BEAT_SECONDS, SILENT_SECONDS = 0.5, 2.5
"""Time between two signs of life of a rank, and time without one after which it counts as lost."""

STORE_SECONDS = 1.0
"""Time limit for the store's answers."""

POLL_SECONDS = 0.02

LINGER_SECONDS = 6.0
"""Time that rank 0 keeps the store for those that learn of a failure later, at most."""

FAILED = "failed"
"""Key of the first failure."""


@dataclass(frozen=True)
class Address:
    """The address at which the processes of a topology meet."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, field: str = "--rendezvous") -> Address:
        """HOST:PORT.

        Raises:
            BadInput: it is not.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 <= int(port) < 65536:
            raise BadInput("expected HOST:PORT", field=field, value=text)
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen_at(address: Address) -> socket.socket:
    """A socket for rank 0's store, on this address only; port 0 takes a free one.

    Raises:
        BadInput: the address is not this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise BadInput(
            f"expected a free address of this machine ({error.strerror})", field="--rendezvous", value=str(address)
        ) from None
    return listener


class Membership:
    """One rank's place among the others.

    Args:
        names: of the ranks, for messages to people. fingerprint: of what all ranks must agree on, such as the scenario.
        listener: of rank 0, from `listen_at`; None for the others.
        join_seconds: time limit for all ranks to come.

    Attributes:
        store: the key-value store. meeting_point: its address. address: this rank's own, towards the others.
        closing: set when this rank leaves.
        watch: called by `check`; raises for what else can fail, such as a process that this one has started.

    Raises:
        TransportError: rank 0 is not there. `gather` waits for the other ranks.
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
        self.rank, self.names, self._keeps_store = rank, list(names), listener is not None
        self._fingerprint, self._join_seconds = fingerprint, join_seconds
        self._deadline = time.monotonic() + join_seconds
        if listener is not None:
            address = Address(address.host, listener.getsockname()[1])
        else:
            self._await_store(address)
        self.meeting_point, self.address = address, _own_address(address)
        self.watch: Callable[[], None] = lambda: None
        self.store = self._connect(address, listener)
        self._pulse_store = self.store if listener is None else self._connect(address, None)
        now = time.monotonic()
        self._seen: list[tuple[bytes, float]] = [(b"", now)] * len(self.names)
        self.closing = threading.Event()
        self._pulse: threading.Thread | None = None
        self._store_silent = self._store_ended = False

    def name(self, rank: int) -> str:
        """A rank in a message to people."""
        return f"rank {rank} ({self.names[rank]})"

    def extend(self, seconds: float) -> None:
        """Give all ranks more time to come."""
        self._deadline = max(self._deadline, time.monotonic() + seconds)

    def gather(self) -> None:
        """Wait until every rank has come.

        Raises:
            TransportError: one does not come, has failed, or was started with other settings.
        """
        self._tell(f"here/{self.rank}", self._fingerprint)
        for rank in range(len(self.names)):
            while not self._knows([f"here/{rank}"]):
                self.check()
                if time.monotonic() > self._deadline:
                    raise self.fail(f"{self.name(rank)} has not come within {self._join_seconds:g} s")
                time.sleep(POLL_SECONDS)
            if self._ask(lambda store: store.get(f"here/{rank}")) != self._fingerprint.encode():  # noqa: B023
                raise self.fail(f"{self.name(rank)} was started with other settings than {self.name(self.rank)}")
        self._pulse = threading.Thread(target=self._keep_pulse, name="pulse", daemon=True)
        self._pulse.start()

    def ready(self) -> None:
        """Wait until every rank has called this: its model is loaded.

        Raises:
            TransportError: one has failed or is lost.
        """
        self._tell(f"ready/{self.rank}", "1")
        keys = [f"ready/{rank}" for rank in range(len(self.names))]
        while not self._knows(keys):
            self.check()
            time.sleep(POLL_SECONDS)

    def publish(self, key: str, value: str) -> None:
        """Enter something in the store that another rank asks for by `published`."""
        self._tell(key, value)

    def published(self, key: str) -> str:
        """Wait for what a rank publishes.

        Raises:
            TransportError: a rank has failed or is lost.
        """
        while not self._knows([key]):
            self.check()
            time.sleep(POLL_SECONDS)
        return (self._ask(lambda store: store.get(key)) or b"").decode()

    def gloo_group(self, seconds: float, name: str) -> dist.ProcessGroupGloo:
        """A gloo group of all ranks, whose operations take at most so many seconds. `name`: under which they meet."""
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
        options._timeout = timedelta(seconds=seconds)
        store = PrefixStore(name, self.store)
        try:
            return dist.ProcessGroupGloo(store, self.rank, len(self.names), options)
        except RuntimeError as error:
            raise self.blame(None, str(error).splitlines()[0]) from None

    def nccl_group(self, seconds: float, name: str) -> Any:
        """An NCCL group of all ranks; those that never send or receive in it need not make it.

        Raises:
            TransportError: this process has no GPU, or PyTorch no NCCL.
        """
        if not dist.is_nccl_available():
            raise self.fail(f"{self.name(self.rank)} has a PyTorch without NCCL")
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        try:
            return dist.ProcessGroupNCCL(PrefixStore(name, self.store), self.rank, len(self.names), options)
        except RuntimeError as error:
            raise self.blame(None, str(error).splitlines()[0]) from None

    def blame(self, peer: int | None, reason: str) -> TransportError:
        """The failure behind a wait that has failed, entered in the store for the others.

        Args:
            peer: the rank that was waited for. reason: what happened, if no other rank is the cause.
        """
        text = self._failure()
        if text is None:
            text = reason if peer is None else f"{self.name(peer)} {reason}"
        return self.fail(text)

    def check(self) -> None:
        """Look whether all ranks are alive; for a rank that waits for no message.

        Raises:
            TransportError: one is not.
        """
        self.watch()
        if (text := self._failure()) is not None:
            raise self.fail(text)

    def fail(self, text: str) -> TransportError:
        """An error with the first failure that a rank has entered in the store: this one, unless there is another."""
        entered = self._ask(lambda store: store.compare_set(FAILED, "", text))
        return TransportError(entered.decode() if entered else text)

    def close(self) -> None:
        """Leave. Rank 0 keeps the store until the others have left, or for a moment, so that they can read it."""
        self._ask(lambda store: store.set(f"gone/{self.rank}", "1"))
        end = time.monotonic() + LINGER_SECONDS
        while self._keeps_store and time.monotonic() < end:
            alive = [
                rank for rank in range(len(self.names)) if self._knows([f"here/{rank}"]) and not self._silent(rank)
            ]
            if self.store.check([f"gone/{rank}" for rank in alive]):
                break
            time.sleep(POLL_SECONDS)
        self.closing.set()

    # -- the store ---------------------------------------------------------------------------------------------------

    def _await_store(self, address: Address) -> None:
        """Wait until the store takes connections. Its own client would write warnings until then."""
        while True:
            try:
                socket.create_connection((address.host, address.port), 1.0).close()
                return
            except OSError:
                if time.monotonic() > self._deadline:
                    raise TransportError(
                        f"{self.name(0)} has not come to {address} within {self._join_seconds:g} s"
                    ) from None
                time.sleep(POLL_SECONDS)

    def _connect(self, address: Address, listener: socket.socket | None) -> TCPStore:
        limit = timedelta(seconds=STORE_SECONDS)
        keep: dict[str, Any] = {} if listener is None else {"master_listen_fd": os.dup(listener.fileno())}
        try:
            return TCPStore(
                address.host, address.port, None, listener is not None, limit, wait_for_workers=False,
                multi_tenant=False, **keep,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"{self.name(0)} cannot be reached at {address} ({_line(error)})") from None

    def _tell(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def _knows(self, keys: list[str]) -> bool:
        """Return whether the store has all of some keys."""
        return bool(self._ask(lambda store: b"1" if store.check(keys) else b""))

    def _failure(self) -> str | None:
        """The first failure that a rank has entered, or a rank that gives no sign of life; None if there is neither."""
        present = self._knows([FAILED])
        if self._store_silent:
            return f"{self.name(0)} {'has ended' if self._store_ended else 'does not answer'}"
        if present and (entered := self._ask(lambda store: store.get(FAILED))):
            return entered.decode()
        lost = self._lost()
        return None if lost is None else f"{self.name(lost)} does not answer"

    def _ask(self, question: Callable[[TCPStore], bytes | None]) -> bytes | None:
        """Ask the store, in a thread: it has no time limit of its own. None if it does not answer."""
        if self._store_silent:
            return None
        answers: list[bytes | None] = []

        def ask() -> None:
            try:
                answers.append(question(self.store) or b"")
            except RuntimeError:
                self._store_ended = True

        thread = threading.Thread(target=ask, name="ask the store", daemon=True)
        thread.start()
        thread.join(STORE_SECONDS)
        self._store_silent = not answers
        return answers[0] if answers else None

    # -- signs of life -----------------------------------------------------------------------------------------------

    def _keep_pulse(self) -> None:
        """Show that this rank is alive, and note which of the others are."""
        keys = [f"pulse/{rank}" for rank in range(len(self.names))]
        count = 0
        self._seen = [(b"", time.monotonic())] * len(self.names)
        while not self.closing.wait(BEAT_SECONDS):
            count += 1
            try:
                self._pulse_store.set(keys[self.rank], str(count))
                present = [rank for rank, key in enumerate(keys) if self._pulse_store.check([key])]
                values = self._pulse_store.multi_get([keys[rank] for rank in present])
            except RuntimeError:
                self._store_ended = True
                return
            now = time.monotonic()
            for rank, value in zip(present, values, strict=True):
                if value != self._seen[rank][0]:
                    self._seen[rank] = value, now

    def _lost(self) -> int | None:
        """A rank that gives no sign of life, the one that has given none for longest; None if all do."""
        _, rank = min(((at, rank) for rank, (_, at) in enumerate(self._seen)), default=(0.0, 0))
        return rank if self._silent(rank) else None

    def _silent(self, rank: int) -> bool:
        """Return whether a rank has given no sign of life for too long."""
        silent = time.monotonic() - self._seen[rank][1] > SILENT_SECONDS
        return silent and self._pulse is not None and rank != self.rank


def _own_address(towards: Address) -> str:
    """The address of this machine that reaches another: loopback stays loopback."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(towards.host).is_loopback:
            return towards.host
    family = socket.AF_INET6 if ":" in towards.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards.host, towards.port or 9))
        return str(probe.getsockname()[0])


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
