"""Topologies whose ranks are processes: the same answers, and one clear line from every rank when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from live.loaded_model import ModelSource
from live.topologies.local import InProcessWorkers
from live.topologies.membership import Address, Membership, listen_at
from live.topologies.processes import QUIET, TopologyBackend
from live.topologies.transport import TransportError
from tests.live.topologies.answers import colocated, requests
from tests.live.topologies.ranks import deployment, serve_until_stopped

ROOT = Path(__file__).parents[3]
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


class Ranks:
    """The four ranks of one topology."""

    def __init__(self, folder: Path, pids: dict[int, int]) -> None:
        self.folder = folder
        self.pids = pids

    def wait_for(self, name: str, seconds: float = 20.0) -> str:
        """The content of a file that a rank writes."""
        deadline = time.monotonic() + seconds
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.02)
        return (self.folder / name).read_text()

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def gone(self) -> bool:
        """Returns True if all processes have ended."""
        alive = []
        for rank, pid in self.pids.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 0)
                alive.append(rank)
        return not alive


Start = Callable[..., Ranks]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts a topology whose model is in a folder."""
    command = [sys.executable, "-m", "tests.live.topologies.ranks"]
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "up\n"

    def ranks(
        folder: Path, kind: str = "bundle", port: int = 0, missing: tuple[int, ...] = (), link: bool = False
    ) -> Ranks:
        (folder / "config.json").write_text(json.dumps(TINY))
        options = {"kind": kind, "folder": str(folder), "port": port or free_port(), "missing": missing, "link": link}
        process.stdin.write(json.dumps(options) + "\n")
        process.stdin.flush()
        return Ranks(folder, {int(rank): pid for rank, pid in json.loads(process.stdout.readline()).items()})

    yield ranks
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its own session, and so all ranks of all tests
    process.wait()
    for pipe in (process.stdin, process.stdout):
        pipe.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def answers_of_one_engine(folder: Path) -> list[list[int]]:
    config = folder / "config.json"
    decoder = ModelSource(config, random=True, dtype="float32", device="cpu", threads=1).load()
    return colocated(decoder, requests(12, seed=1))


@pytest.mark.parametrize("link", [False, True], ids=["through the host", "from device to device"])
@pytest.mark.parametrize("kind", ["bundle", "pools", "with chunks"])
def test_answers_over_sockets_are_those_of_one_engine_and_a_stop_ends_all(
    kind: str, link: bool, start: Start, tmp_path: Path
) -> None:
    ranks = start(tmp_path, kind, link=link)
    answers = json.loads(ranks.wait_for("answers.json"))
    assert answers == answers_of_one_engine(tmp_path)
    (tmp_path / "stop").touch()
    assert {ranks.wait_for(str(rank)) for rank in range(1, 4)} == {"ended"}
    assert ranks.wait_for("0") == "stopped"


@pytest.mark.parametrize("kind", ["bundle", "pools"])
def test_workers_in_this_process_give_the_answers_of_one_engine(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "stop").touch()
    topology = deployment(tmp_path, kind)
    backend = TopologyBackend(topology, InProcessWorkers(topology))
    assert asyncio.run(serve_until_stopped(backend, tmp_path)) == "stopped"
    backend.close()
    assert json.loads((tmp_path / "answers.json").read_text()) == answers_of_one_engine(tmp_path)
    assert not backend._thread.is_alive()


LOST = [
    ("bundle", 0, "coordinator", signal.SIGKILL),
    ("bundle", 2, "attention 1", signal.SIGKILL),
    ("bundle", 3, "ffn 0", signal.SIGKILL),
    ("bundle", 2, "attention 1", signal.SIGSTOP),
    ("pools", 0, "frontend 0", signal.SIGKILL),
    ("pools", 1, "prefill 0", signal.SIGKILL),
    ("pools", 3, "decode 0", signal.SIGSTOP),
    ("with chunks", 1, "prefill 0", signal.SIGKILL),
    ("with chunks", 3, "decode 0", signal.SIGKILL),
]
LINKED = [("bundle", 3, "ffn 0", signal.SIGKILL)]
SILENT = [
    ("bundle", 0, "coordinator", signal.SIGSTOP, False),
    ("bundle", 3, "ffn 0", signal.SIGSTOP, False),
    ("bundle", 2, "attention 1", signal.SIGSTOP, True),
]
"""Further ranks that do not answer, which is found after some seconds in the same way."""


@pytest.mark.parametrize(
    ("kind", "rank", "name", "number", "link"),
    [
        *((*case, False) for case in LOST),
        *((*case, True) for case in LINKED),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SILENT),
    ],
)
def test_a_rank_that_is_lost_is_named_by_all_others(
    kind: str, rank: int, name: str, number: int, link: bool, start: Start, tmp_path: Path
) -> None:
    what = "has ended" if number == signal.SIGKILL else "does not answer"
    ranks = start(tmp_path, kind, link=link)
    ranks.wait_for("answers.json")
    ranks.signal(rank, number)
    begin = time.monotonic()
    lines = {ranks.wait_for(str(survivor), 10) for survivor in range(4) if survivor != rank}
    assert lines == {f"rank {rank} ({name}) {what}"}
    assert time.monotonic() - begin < 10
    with contextlib.suppress(ProcessLookupError):
        ranks.signal(rank, signal.SIGKILL)
    deadline = time.monotonic() + 2
    while not ranks.gone():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("missing", "line"), [
    (2, "rank 2 (attention 1) has not come within 2 s"), (0, "rank 0 (coordinator) has not come to 127.0.0.1:"),
])  # fmt: skip
def test_a_rank_that_never_comes_is_named(missing: int, line: str, start: Start, tmp_path: Path) -> None:
    ranks = start(tmp_path, missing=(missing,))
    for rank in ranks.pids:
        assert ranks.wait_for(str(rank), 10).startswith(line)


def test_a_port_that_is_taken_is_named(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ranks = start(tmp_path, port=port, missing=(1, 2, 3))
        line = ranks.wait_for("0", 10)
    assert f"'127.0.0.1:{port}', expected a free address of this machine" in line


def test_other_settings_are_refused() -> None:
    """Two ranks whose fingerprints differ: both say so."""
    address = Address("127.0.0.1", free_port())
    with listen_at(address) as listener, ThreadPoolExecutor() as threads:
        first = Membership(address, 0, ["a", "b"], "x", listener=listener, join_seconds=2)
        second = Membership(address, 1, ["a", "b"], "y", join_seconds=2)
        gathered = [threads.submit(members.gather) for members in (first, second)]
        for future in gathered:
            with pytest.raises(TransportError, match="was started with other settings than"):
                future.result()
        second.close()
        first.close()
