"""A topology whose workers all run in the server's process gives the answers of one engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from live.generation import Generation
from live.loaded_model import LoadedModel
from live.topologies.front import TopologyBackend
from live.topologies.in_process import InProcessWorkers
from tests.live.topologies.answers import colocated, requests
from tests.live.topologies.ranks import deployment
from tests.live.topologies.test_processes import TINY


async def answers(backend: TopologyBackend, generations: list[Generation]) -> list[list[int]]:
    """Half of the requests at once, the others when the first of these has ended."""
    ended, failed = asyncio.Event(), asyncio.get_running_loop().create_future()
    backend.start(lambda progress: ended.set() if progress.finished else None, failed.set_result)
    half = len(generations) // 2
    for generation in generations[:half]:
        backend.submit(generation)
    await asyncio.wait_for(ended.wait(), 30)
    for generation in generations[half:]:
        backend.submit(generation)
    while not all(each.finish_reason for each in generations):
        ended.clear()
        await asyncio.wait_for(ended.wait(), 30)
    assert not failed.done()
    return [each.output for each in generations]


@pytest.mark.parametrize("kind", ["bundle", "pools"])
def test_workers_in_this_process_give_the_answers_of_one_engine(kind: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    wanted = deployment(tmp_path, kind)
    backend = TopologyBackend(wanted, InProcessWorkers(wanted))
    found = asyncio.run(answers(backend, requests(12, seed=1)))
    backend.close()
    decoder = LoadedModel(config, random=True, dtype="float32", device="cpu", threads=1).decoder
    assert found == colocated(decoder, requests(12, seed=1))
    assert not backend._thread.is_alive()
