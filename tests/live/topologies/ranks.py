"""Starts the ranks of a topology as processes, forked from one that has imported everything: imports take seconds.

Reads a line of JSON for each topology: {"kind": "bundle", "pools" or "with chunks", "folder", "port", "link": whether
activations and KV blocks go from device to device, "missing": ranks that are not started}. Writes the process ids of
the ranks as a line of JSON. Each rank writes its last line to the file of its number in the folder; rank 0 writes the
answers to `answers.json` before, and then sends requests until it fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from live.loaded_model import ModelSource
from live.topologies.bundle.coordinator import BundleLayout
from live.topologies.deployment import Deployment
from live.topologies.membership import Address, Membership, listen_at
from live.topologies.processes import (
    BundleDeployment,
    PoolsDeployment,
    TimeLimits,
    TopologyBackend,
    WorkerProcesses,
    run_worker,
)
from live.topologies.sockets import device_link
from tests.live.topologies.answers import layout, outputs, requests, settings
from workloads.errors import TwinError

LIMITS = TimeLimits(join=2.0, answer=4.0)


def deployment(folder: Path, kind: str) -> Deployment:
    """Four ranks for the model in the folder: a bundle 2A-1F, or two prefill engines and a decode engine."""
    model = ModelSource(folder / "config.json", True, "float32", "cpu", 1)
    if kind == "bundle":
        return BundleDeployment(model, BundleLayout(2, 1, 2, settings(2)))
    with_chunks = kind == "with chunks"
    prefill = settings(4, max_num_batched_tokens=6 if with_chunks else 64)
    return PoolsDeployment(model, layout(2, 1, prefill, settings(4), with_chunks=with_chunks))


def run_front(folder: Path, port: int, kind: str, link: bool) -> str:
    """Rank 0: serve requests on an event loop; returns why it ended."""
    topology, address = deployment(folder, kind), Address("127.0.0.1", port)
    with listen_at(address) as listener:
        names, fingerprint = topology.names, topology.fingerprint
        members = Membership(address, 0, names, fingerprint, listener=listener, join_seconds=LIMITS.join)
        try:
            members.gather()
            members.ready()
            keep = device_link(members, LIMITS.answer, "cpu", gloo_group) if link else None
            backend = TopologyBackend(topology, WorkerProcesses(topology, members, None, LIMITS))
        except TwinError:
            members.close()
            raise
        try:
            return asyncio.run(serve_until_stopped(backend, folder))
        finally:
            backend.close()
            del keep


async def serve_until_stopped(backend: TopologyBackend, folder: Path) -> str:
    """Serve the same requests again and again, half of them when the first of the others has ended; why it ended."""
    failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    finished = asyncio.Event()
    backend.start(lambda progress: finished.set() if progress.finished else None, failed.set_result)
    batches = 0
    while not failed.done():
        generations = requests(12, seed=1)
        later = generations[6:]
        for generation in generations:
            object.__setattr__(generation.request, "id", generation.request.id + 100 * batches)
        for generation in generations[:6]:
            backend.submit(generation)
        while not failed.done() and not all(generation.finish_reason for generation in generations):
            finished.clear()
            await asyncio.wait([failed, asyncio.ensure_future(finished.wait())], return_when=asyncio.FIRST_COMPLETED)
            while later:
                backend.submit(later.pop())
        if not batches:
            write(folder / "answers.json", json.dumps(outputs(generations)))
        batches += 1
        if (folder / "stop").exists():
            return "stopped"
    return failed.result()


def gloo_group(store: PrefixStore, members: Membership, limit: timedelta) -> dist.ProcessGroupGloo:
    """A group like those that GPUs have, between CPUs: gloo in NCCL's place.

    Unlike NCCL, gloo connects all members at once, so that rank 0 has to come, too.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=members.address)]
    options._timeout = limit
    return dist.ProcessGroupGloo(store, members.rank, len(members.names), options)


def run_rank(rank: int, folder: Path, port: int, kind: str, link: bool) -> None:
    """One rank's life, in a process of its own."""
    try:
        line = "ended"
        if rank == 0:
            line = run_front(folder, port, kind, link)
        else:
            make_group = gloo_group if link else None
            run_worker(deployment(folder, kind), rank, Address("127.0.0.1", port), LIMITS, make_group)
    except TwinError as error:
        line = str(error)
    write(folder / str(rank), line)


def write(path: Path, text: str) -> None:
    """Write a file that comes into being with all of its content."""
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").rename(path)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("up", flush=True)
    for line in sys.stdin:
        options = json.loads(line)
        pids = {}
        for rank in range(4):
            if rank in options["missing"]:
                continue
            pids[rank] = os.fork()
            if not pids[rank]:
                os.close(0)
                run_rank(rank, Path(options["folder"]), options["port"], options["kind"], options["link"])
                os._exit(0)
        print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    main()
