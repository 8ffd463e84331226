"""Direct execution against the wall: mean TPOT of a bundle 1A-1F, by virtual clocks and as processes over TCP.

    python -m benchmarks.direct_execution [--model FILE] [--requests 60] [--repeat 3] [--json]

Both run the same requests, in turns. First the link is measured: a message of a full microbatch's rows goes to another
process and back. The CPU time of that, less packing and unpacking, is the link's overhead, and the rest of the time its
latency. Last, direct execution runs
beside a process that burns a core. The processes need two idle cores, since on a busy machine they measure the other
programs too. Exit codes: 4 if the two differ by more than --tolerance; 3 if they do on a machine that was not idle,
which shows nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.provenance import provenance
from latency_models.stages import MessageLink
from live.engine import Progress
from live.generation import Generation
from live.loaded_model import ModelSource
from live.models.decoder import Decoder
from live.models.weights import random_weights
from live.topologies.bundle.coordinator import OUTPUT, BundleLayout
from live.topologies.direct_time import DirectTime
from live.topologies.membership import Address, Membership, listen_at
from live.topologies.processes import QUIET, BundleDeployment, TimeLimits, run_worker
from live.topologies.sockets import SocketTransport
from live.topologies.transport import Message, Receive, Role, Transport, pack, unpack
from live.validation.bundle import MeasuredBundle, closed_loop, run_in_turns
from reports.metrics import bundle_metrics, tpot
from schedulers.engine_config import EngineConfig
from workloads.lengths import Geometric

MODEL = Path(__file__).parents[1] / "examples" / "models" / "tiny-llama.json"
LIMITS = TimeLimits(join=60.0, answer=60.0)
ROUND_TRIPS = 400
IDLE = 0.3
"""Load average up to which a machine counts as idle."""

LENGTHS = 40, 20
"""Mean prompt and output tokens of geometric lengths, as in `examples/afd-tiny-cpu.yaml`."""

SPAWN = multiprocessing.get_context("spawn")


def worker(deployment: BundleDeployment, rank: int, port: int) -> None:
    """The life of an attention or FFN worker's process."""
    os.environ.update(QUIET)
    run_worker(deployment, rank, Address("127.0.0.1", port), LIMITS)


def echo(deployment: BundleDeployment, port: int) -> None:
    """The life of the process at the link's other end."""
    torch.set_num_threads(1)
    members = Membership(Address("127.0.0.1", port), 1, ["one end", "other end"], "link", join_seconds=LIMITS.join)
    members.gather()
    transport = SocketTransport(members, deployment.forms(), LIMITS.answer)
    transport.run(_echo(transport, deployment))
    transport.close()
    members.close()


def _echo(transport: Transport, deployment: BundleDeployment) -> Role:
    answer = _rows(deployment)
    for _ in range(ROUND_TRIPS):
        yield Receive(0)
        transport.send(0, answer)


def _rows(deployment: BundleDeployment) -> Message:
    """A message of a full microbatch's rows."""
    rows = torch.zeros(deployment.layout.batch_size, deployment.config.shape.hidden)
    return Message(OUTPUT, (0, 0), (rows,))


@contextlib.contextmanager
def _together(names: list[str], fingerprint: str, target: Any, arguments: list[Any]) -> Iterator[Membership]:
    """This process as rank 0, among others of which each runs `target(*its arguments, port)`."""
    address = Address("127.0.0.1", 0)
    with listen_at(address) as listener:
        port = listener.getsockname()[1]
        processes = [SPAWN.Process(target=target, args=(*values, port)) for values in arguments]
        for values in processes:
            values.start()
        members = Membership(address, 0, names, fingerprint, listener=listener, join_seconds=LIMITS.join)
        try:
            members.gather()
            yield members
        finally:
            members.close()
            for values in processes:
                values.join(10.0)
                values.kill()


def measure_link(deployment: BundleDeployment) -> MessageLink:
    """The link between processes, by medians; its bandwidth is counted into the latency."""
    trips: list[tuple[float, float, float]] = []  # wall and CPU seconds, CPU seconds of packing

    def role(transport: Transport) -> Role:
        message, forms = _rows(deployment), deployment.forms()
        for _ in range(ROUND_TRIPS):
            wall, cpu = time.perf_counter(), time.thread_time()
            transport.send(1, message)
            yield Receive(1)
            wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
            begin = time.thread_time()
            unpack(pack(message), forms)
            trips.append((wall, cpu, time.thread_time() - begin))

    with _together(["one end", "other end"], "link", echo, [(deployment,)]) as members:
        transport = SocketTransport(members, deployment.forms(), LIMITS.answer)
        transport.run(role(transport))
        transport.close()
    wall, cpu, packing = (statistics.median(column[ROUND_TRIPS // 4 :]) for column in zip(*trips, strict=True))
    # Each end sends once and receives once.
    return MessageLink(latency=max(wall / 2 - cpu, 0.0), overhead=max((cpu - packing) / 2, 0.0))


def wall_tpot(deployment: BundleDeployment, prefill: Any, decode: Any, completions: int) -> float:
    """Mean TPOT of the bundle as processes, seconds of wall time."""
    warm_up, generations = closed_loop(deployment.layout, deployment.config.shape.vocabulary, prefill, decode)
    finished: list[Generation] = []
    warm: list[Generation] = []

    def note(progress: Progress) -> None:
        for generation in progress.finished:
            (warm if len(warm) < len(warm_up) else finished).append(generation)
        if len(warm) == len(warm_up) and generations:
            while generations:
                coordinator.submit(generations.pop(0))
        if len(finished) >= completions:
            coordinator.stop()

    arguments = [(deployment, rank) for rank in range(1, len(deployment.names))]
    with _together(deployment.names, deployment.fingerprint, worker, arguments) as members:
        members.ready()
        transport = SocketTransport(members, deployment.forms(), LIMITS.answer)
        coordinator = deployment.front(transport, note)
        for generation in warm_up:
            coordinator.submit(generation)
        transport.run(coordinator.run())
        transport.close()
    return mean_tpot(finished[:completions])


def mean_tpot(generations: list[Generation]) -> float:
    """The mean over requests of the time between two tokens."""
    result = tpot(
        np.array([generation.first_token for generation in generations]),
        np.array([generation.last_token for generation in generations]),
        np.array([len(generation.output) for generation in generations]),
    )
    assert result is not None
    return result


def burn() -> None:
    """Keep a core busy."""
    while True:
        pass


@contextlib.contextmanager
def burning() -> Iterator[None]:
    """Run a process that burns a core."""
    process = SPAWN.Process(target=burn, daemon=True)
    process.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        process.kill()
        process.join()


def measure(deployment: BundleDeployment, completions: int, repeat: int) -> dict[str, Any]:
    """All figures, seconds."""
    config, layout = deployment.config, deployment.layout
    decoder = Decoder(config, random_weights(config, torch.float32, "cpu", deployment.model.seed))
    rng, count = np.random.default_rng(5), completions + layout.batch_size * layout.microbatches
    prefill, decode = (Geometric(mean).sample(rng, count) for mean in LENGTHS)
    link = measure_link(deployment)

    def direct() -> float:
        bundle = MeasuredBundle(layout, decoder, prefill, decode, completions, time=DirectTime(link))
        metrics = bundle_metrics(run_in_turns([bundle])[0].times)
        assert metrics.tpot_gaps is not None
        return metrics.tpot_gaps

    pairs = [(wall_tpot(deployment, prefill, decode, completions), direct()) for _ in range(repeat)]
    with burning():
        repeats = [direct() for _ in range(repeat)]
    wall, virtual = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "latency": link.latency,
        "overhead": link.overhead,
        "tpot_wall": [pair[0] for pair in pairs],
        "tpot_direct": [pair[1] for pair in pairs],
        "tpot_direct_beside_burning": repeats,
        "difference": virtual / wall - 1,
        "difference_beside_burning": statistics.median(repeats) / virtual - 1,
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="a config.json")
    parser.add_argument("--batch-size", type=int, default=4, help="requests of the attention instance in a microbatch")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--requests", type=int, default=60, help="completions of a run")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind; the medians are compared")
    parser.add_argument("--tolerance", type=float, default=0.05, help="largest difference of mean TPOT")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(QUIET)
    settings = EngineConfig(num_gpu_blocks=256 * options.batch_size, max_num_seqs=options.batch_size)
    layout = BundleLayout(1, 1, options.microbatches, settings)
    deployment = BundleDeployment(ModelSource(options.model, True, "float32", "cpu", 1), layout)
    before = os.getloadavg()[0]
    result = {**measure(deployment, options.requests, options.repeat), "load_average_before": before}
    missed, idle = abs(result["difference"]) > options.tolerance, before <= IDLE
    code = 0 if not missed else 4 if idle else 3
    if options.json:
        print(json.dumps({**provenance("twin.benchmark-direct-execution/1"), **result, "idle": idle}, indent=1))
        return code
    print(f"load average before: {before:.1f}")
    print(f"link: latency {1e6 * result['latency']:.0f} µs, overhead {1e6 * result['overhead']:.0f} µs at each end")
    for name, title in (
        ("wall", "processes, wall"),
        ("direct", "direct"),
        ("direct_beside_burning", "direct, burning"),
    ):
        print(f"{title:>16}: mean TPOT {', '.join(f'{1e3 * seconds:.2f}' for seconds in result[f'tpot_{name}'])} ms")
    print(f"direct against wall {result['difference']:+.1%}")
    print(f"direct beside a burning process against direct {result['difference_beside_burning']:+.1%}")
    goal = f"goal {options.tolerance:.0%}: {'missed' if missed else 'met'}"
    print(goal if idle else f"{goal}, but the machine was not idle (load average above {IDLE:g}): run it again")
    return code


if __name__ == "__main__":
    sys.exit(main())
