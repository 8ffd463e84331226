"""Connections between ranks: messages come whole and in order, and every wait has an end."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from live.topologies.connections import GREETING, OUTSTANDING, Connection, connect_all
from live.topologies.membership import Address, Membership, listen_at
from live.topologies.transport import TransportError

LARGE = 8_000_000
"""Bytes that no kernel buffer takes at once."""


def pair(limit: float = 20.0) -> tuple[Connection, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return Connection(one, limit), Connection(other, limit)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    both = pair()
    yield both
    for each in both:
        each.close()


@given(st.lists(st.sampled_from([1, 100, 70_000, 1_000_000]), min_size=1, max_size=OUTSTANDING))
@settings(max_examples=10, deadline=None)
def test_messages_of_any_size_come_whole_and_in_order(sizes: list[int]) -> None:
    one, other = pair()
    for number, size in enumerate(sizes):
        one.send(memoryview(bytes([number]) * size))
    for number, size in enumerate(sizes):
        found = bytearray(size)
        other.receive(memoryview(found))
        assert found == bytes([number]) * size
    one.flush()
    one.close()
    other.close()


def test_two_ranks_that_send_at_once_do_not_wait_for_each_other(ends: tuple[Connection, Connection]) -> None:
    for end in ends:
        end.send(memoryview(bytes(LARGE)))
    for end in ends:
        end.receive(memoryview(bytearray(LARGE)))


def send_too_much(end: Connection) -> None:
    block = memoryview(bytes(LARGE))
    for _ in range(OUTSTANDING + 2):
        end.send(block)


def test_a_peer_that_does_not_read_is_waited_for_no_longer_than_the_limit() -> None:
    one, other = pair(limit=0.2)
    with pytest.raises(TimeoutError):
        send_too_much(one)
    with pytest.raises(TimeoutError):
        one.flush()
    with pytest.raises(TimeoutError):
        one.receive(memoryview(bytearray(1)))
    one.close()
    other.close()


def test_the_end_of_a_peer_ends_waits(ends: tuple[Connection, Connection]) -> None:
    one, other = ends
    threading.Timer(0.1, one.close).start()
    with pytest.raises(OSError, match=r"^$|reset"):
        other.receive(memoryview(bytearray(1)))


def meeting(address: Address, listener: socket.socket, count: int) -> list[Membership]:
    names = [f"rank {rank}" for rank in range(count)]
    first = Membership(address, 0, names, "the same", listener=listener, join_seconds=5)
    address = Address(address.host, listener.getsockname()[1])
    return [first, *(Membership(address, rank, names, "the same", join_seconds=5) for rank in range(1, count))]


def call(port: int, greeting: bytes) -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.sendall(greeting)
    stranger.shutdown(socket.SHUT_WR)
    return stranger


def exchange(found: dict[int, dict[int, Connection]]) -> list[tuple[int, int]]:
    """Each end of each connection says its rank and the other's; the pairs that were heard."""
    ends = [(rank, other, end) for rank, others in found.items() for other, end in others.items()]
    for rank, other, end in ends:
        end.send(memoryview(struct.pack("2i", rank, other)))
    heard = []
    for rank, other, end in ends:
        said = bytearray(8)
        end.receive(memoryview(said))
        assert struct.unpack("2i", said) == (other, rank)
        heard.append((other, rank))
    return heard


def test_every_two_ranks_are_connected_and_strangers_are_turned_away() -> None:
    """Strangers call rank 0 with another secret, as a rank that there is not, and with nothing."""
    found: dict[int, dict[int, Connection]] = {}
    with listen_at(address := Address("127.0.0.1", 0)) as listener:
        members = meeting(address, listener, 3)
        threads = [
            threading.Thread(target=lambda each: found.update({each.rank: connect_all(each, 5.0)}), args=[member])
            for member in members
        ]
        threads[0].start()
        port = Address.parse(members[0].published("listens/0")).port
        secret = members[0].published("secret").encode()
        strangers = [call(port, each) for each in (GREETING.pack(b"x" * 16, 1), GREETING.pack(secret, 7), b"")]
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(exchange(found)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
        assert [stranger.recv(1) for stranger in strangers] == [b"", b"", b""]
        for each in [*strangers, *(end for others in found.values() for end in others.values())]:
            each.close()
        for member in reversed(members):
            member.close()


def test_a_rank_that_does_not_connect_is_named() -> None:
    address = Address("127.0.0.1", 0)
    with listen_at(address) as listener:
        first, second = meeting(address, listener, 2)
        with pytest.raises(TransportError, match=r"rank 1 \(rank 1\) has not connected within 0.2 s"):
            connect_all(first, 0.2)
        second.close()
        first.close()
