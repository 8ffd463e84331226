"""Connections between ranks: messages come whole and in order, and every wait has an end."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from live.topologies.membership import Address, Membership, listen_at
from live.topologies.sockets import GREETING, OUTSTANDING, Connection, connect_all
from live.topologies.transport import TransportError

LARGE = 8_000_000
"""Bytes that no kernel buffer takes at once."""


@contextmanager
def ends(limit: float = 20.0) -> Iterator[tuple[Connection, Connection]]:
    """The two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        first, second = Connection(caller, limit), Connection(listener.accept()[0], limit)
    yield first, second
    first.close()
    second.close()


@given(st.lists(st.sampled_from([1, 100, 70_000, 1_000_000]), min_size=1, max_size=OUTSTANDING))
@settings(max_examples=settings().max_examples // 6)
def test_messages_of_any_size_come_whole_and_in_order(sizes: list[int]) -> None:
    with ends() as (first, second):
        for number, size in enumerate(sizes):
            first.send(memoryview(bytes([number]) * size))
        for number, size in enumerate(sizes):
            buffer = bytearray(size)
            second.receive(memoryview(buffer))
            assert buffer == bytes([number]) * size
        first.flush()


def test_two_ranks_that_send_at_once_do_not_wait_for_each_other() -> None:
    with ends() as both_ends:
        for end in both_ends:
            end.send(memoryview(bytes(LARGE)))
        for end in both_ends:
            end.receive(memoryview(bytearray(LARGE)))


def send_too_much(end: Connection) -> None:
    block = memoryview(bytes(LARGE))
    for _ in range(OUTSTANDING + 2):
        end.send(block)


def test_a_peer_that_does_not_read_is_waited_for_no_longer_than_the_limit() -> None:
    with ends(limit=0.2) as (first, _):
        for wait in (lambda: send_too_much(first), first.flush, lambda: first.receive(memoryview(bytearray(1)))):
            with pytest.raises(TimeoutError):
                wait()


@pytest.mark.parametrize("end", [Connection.close, Connection.interrupt])
def test_the_end_of_a_peer_ends_waits(end: Callable[[Connection], None]) -> None:
    with ends() as (first, second):
        threading.Timer(0.1, end, [first]).start()
        with pytest.raises(OSError, match=r"^$|reset"):
            second.receive(memoryview(bytearray(1)))


@contextmanager
def meeting(count: int) -> Iterator[list[Membership]]:
    """The memberships of some ranks that have gathered."""
    names = [f"rank {rank}" for rank in range(count)]
    with listen_at(address := Address("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        members = [Membership(address, 0, names, "the same", listener=listener, join_seconds=5)]
        address = members[0].meeting_point
        members += [Membership(address, rank, names, "the same", join_seconds=5) for rank in range(1, count)]
        list(threads.map(Membership.gather, members))
        yield members
        for member in reversed(members):
            member.close()


def call(port: int, greeting: bytes) -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.sendall(greeting)
    stranger.shutdown(socket.SHUT_WR)
    return stranger


def test_every_two_ranks_are_connected_and_strangers_are_turned_away() -> None:
    """Strangers call rank 0 with another secret, as a rank that there is not, and with nothing."""
    with meeting(3) as members, ThreadPoolExecutor() as threads:
        first = threads.submit(connect_all, members[0], 5.0)
        port = Address.parse(members[0].published("listens/0")).port
        secret = members[0].published("secret").encode()
        strangers = [call(port, greeting) for greeting in (GREETING.pack(b"x" * 16, 1), GREETING.pack(secret, 7), b"")]
        connections = [first, *(threads.submit(connect_all, member, 5.0) for member in members[1:])]
        ends = [(rank, peer, end) for rank, future in enumerate(connections) for peer, end in future.result().items()]
        assert sorted((rank, peer) for rank, peer, _ in ends) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
        for rank, peer, end in ends:
            end.send(memoryview(struct.pack("2i", rank, peer)))
        for rank, peer, end in ends:
            pair_of_peer = bytearray(8)
            end.receive(memoryview(pair_of_peer))
            assert struct.unpack("2i", pair_of_peer) == (peer, rank)
        assert [stranger.recv(1) for stranger in strangers] == [b"", b"", b""]
        for end in (*strangers, *(end for _, _, end in ends)):
            end.close()


def test_a_rank_that_does_not_connect_is_named() -> None:
    with (
        meeting(2) as members,
        pytest.raises(TransportError, match=r"rank 1 \(rank 1\) has not connected within 0.2 s"),
    ):
        connect_all(members[0], 0.2)


def test_a_caller_that_is_no_rank_changes_nothing() -> None:
    with listen_at(address := Address("127.0.0.1", 0)) as listener:
        first = Membership(address, 0, ["a", "b"], "x", listener=listener, join_seconds=0.5)
        for line in (b"no JSON\n", b"5\n", b'["here/0", "x"]\n', b'["here/2", "x"]\n', b'["failed", "x"]\n'):
            with call(first.meeting_point.port, line) as stranger:
                assert stranger.recv(1) == b""
        with pytest.raises(TransportError, match=r"^rank 1 \(b\) has not come within 0.5 s$"):
            first.gather()
        first.close()
