"""Topologies on real GPUs: `pytest -n 0 tests/live/topologies/test_gpu.py`. `tests/rehearsal` runs the same on none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch

from live.models.decoder import Decoder
from live.topologies.bundle.coordinator import BundleLayout
from live.topologies.local import RoleStreams
from tests.live.topologies.answers import (
    CONFIGS,
    check_served,
    layout,
    local_bundle,
    local_pools,
    make_decoder,
    requests,
    settings,
)

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def decoder_on_gpu(name: str) -> Decoder:
    """A tiny model with the weights of the CPU's tests. Float32 leaves no ties to rounding."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return make_decoder(name, device="cuda")


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("model", CONFIGS)
def test_a_bundle_on_streams_gives_the_tokens_of_one_engine(model: str, graphs: bool) -> None:
    decoder, streams = decoder_on_gpu(model), RoleStreams()
    places = BundleLayout(3, 2, 2, settings(4, num_gpu_blocks=200))
    bundle = local_bundle(places, decoder, timekeeper=streams, handover=streams, graphs=graphs)
    for seed in (1, 2, 3):  # graphs are captured on the way
        check_served(bundle, decoder, requests(40, seed=seed))


@pytest.mark.parametrize("graphs", [False, True])
def test_pools_on_streams_give_the_tokens_of_one_engine(graphs: bool) -> None:
    decoder, streams = decoder_on_gpu("qwen3"), RoleStreams()
    places = layout(2, 1, settings(4), settings(8))
    pools = local_pools(places, decoder, graphs=graphs, timekeeper=streams, handover=streams)
    check_served(pools, decoder, requests(40))


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs a GPU for each worker of a bundle 2A-1F")
def test_a_bundle_over_nccl_serves_what_one_process_serves(tmp_path: Path) -> None:
    model, scenario = ROOT / "examples/models/tiny-llama.json", ROOT / "examples/afd-tiny-cpu.yaml"
    answers = []
    for more in ([], ["--in-process"]):
        command = [
            sys.executable, "-m", "live.server", "--model", str(model), "--random-weights", "--device", "cuda",
            "--dtype", "float32", "--scenario", str(scenario), "--set", "ratio=2", "--port", "0",
            "--join-seconds", "60", *more,
        ]  # fmt: skip
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
            url = server.stdout.readline().split()[0]
            body = {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
            request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urlopen(request) as response:
                answers.append(json.load(response)["choices"][0]["token_ids"])
            server.terminate()
    assert answers[0] == answers[1]
