"""The command that serves a topology: one starts all workers, clients get errors, and nothing is left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels.sampling import SamplingParams
from live.backend import EngineBackend
from live.generation import make_generation
from live.loaded_model import ModelSource
from live.server.loading import engine_of_flags
from live.server.options import EngineOptions
from tests.live.server.conftest import running
from tests.live.test_lora import ATTENTION, EVERY, write_adapter
from workloads.errors import BadInput

pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from live.server.__main__ import serve_live
from live.server.options import ModelOptions
from twin.cli import run

ROOT = Path(__file__).parents[3]
BUNDLE, POOLS = ROOT / "examples" / "afd-tiny-cpu.yaml", ROOT / "examples" / "pd-tiny-cpu.yaml"
MODEL = ROOT / "examples" / "models" / "tiny-llama.json"


def workers_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    values = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    values.append(int(entry.name))
    return sorted(values)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The server of a bundle 1A-1F, and its port."""
    command = [
        sys.executable, "-m", "live.server", "--model", str(MODEL), "--random-weights", "--scenario", str(BUNDLE),
        "--set", "ratio=1", "--port", "0",
    ]  # fmt: skip
    with (tmp_path / "stderr").open("w") as log:
        process = subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=log,
            text=True,
        )  # fmt: skip
    line = process.stdout.readline()
    started = workers_of(process.pid)
    try:
        assert line.startswith("http://127.0.0.1:"), (tmp_path / "stderr").read_text()
        assert len(started) == 2
        yield process, int(line.split()[0].rpartition(":")[2])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        deadline = time.monotonic() + 10
        while alive(started) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(started)


def test_a_client_gets_an_error_when_a_worker_is_killed(
    server: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    process, port = server
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def post(**fields: object) -> http.client.HTTPResponse:
        body = {"prompt": [1, 2, 3], "ignore_eos": True, "temperature": 0, **fields}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    short = json.loads(post(max_tokens=5).read())
    assert len(short["choices"][0]["token_ids"]) == 5
    result = json.loads(post(max_tokens=5, logprobs=1).read())["choices"][0]
    assert result["token_ids"] == short["choices"][0]["token_ids"]
    assert [max(row.values()) for row in result["logprobs"]["top_logprobs"]] == result["logprobs"]["token_logprobs"]
    refused = post(max_tokens=5, prompt_logprobs=1)
    assert (refused.status, b"expected output tokens to be wanted" in refused.read()) == (400, True)
    stream = post(max_tokens=4000, stream=True)
    assert stream.status == 200
    first = json.loads(stream.readline().removeprefix(b"data: "))["choices"][0]["token_ids"]
    assert first == short["choices"][0]["token_ids"][: len(first)]  # one event may have several tokens
    begin = time.monotonic()
    os.kill(workers_of(process.pid)[-1], signal.SIGKILL)
    tail = stream.read().decode()
    connection.close()
    assert "rank 2 (ffn 0) has ended" in tail
    assert "engine_failed" in tail
    assert process.wait(10) == 1
    assert time.monotonic() - begin < 10
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert lines == ["live.server: rank 2 (ffn 0) has ended"]


@pytest.mark.parametrize(
    ("scenario", "flags", "message"),
    [
        (BUNDLE, ["--set", "ratio=1:4"], "ratio: got '1:4', expected one ratio to serve with"),
        (BUNDLE, ["--max-num-seqs", "4"], "--max-num-seqs: got 4, expected none beside a scenario of a bundle"),
        (BUNDLE, ["--num-gpu-blocks", "0"], "num_gpu_blocks: expected at least 1, found 0"),
        (BUNDLE, ["--max-num-batched-tokens", "2"], "max_num_batched_tokens: expected at least max_num_seqs (4)"),
        (BUNDLE, ["--role", "decode"], "--role: got 'decode', expected coordinator, attention, ffn"),
        (BUNDLE, ["--role", "ffn", "--rank", "1"], "--rank: got 1, expected 0 to 0, of ffn"),
        (BUNDLE, ["--role", "ffn"], "--rendezvous: expected it beside --role"),
        (BUNDLE, ["--rendezvous", "here"], "--rendezvous: got 'here', expected HOST:PORT"),
        (BUNDLE, ["--in-process", "--role", "ffn"], "--role: got 'ffn', expected none beside --in-process"),
        (BUNDLE, ["--join-seconds", "0"], "--join-seconds: got 0.0, expected a number above 0"),
        (POOLS, ["--max-num-seqs", "4"], "--max-num-seqs: got 4, expected none beside --scenario"),
        (POOLS, ["--module", "poems=x"], "--module: got 'poems=x', expected NAME=PATH, with a name of model-0"),
        (POOLS, ["--decoder-bits", "5"], "--decoder-bits: got 5, expected 3 or 4"),
        (
            POOLS,
            ["--decoder-bits", "4", "--set", "system.decode=isolated"],
            "--decoder-bits: got 4, expected it beside several models with a shared decode pool",
        ),
        (BUNDLE, ["--decoder-bits", "4"], "--decoder-bits: got 4, expected none: a bundle serves one model"),
        (POOLS, ["--set", "engine.async_scheduling=true"], "engine.async_scheduling: got True, expected false"),
        (None, ["--in-process"], "--in-process: got True, expected it beside --scenario of a topology"),
        (None, ["--role", "ffn"], "--role: got 'ffn', expected it beside --scenario of a topology"),
    ],
)
def test_what_a_topology_cannot_be_started_with(scenario: Path | None, flags: list[str], message: str, refusal) -> None:
    flags_before = [] if scenario is None else ["--scenario", str(scenario)]
    assert message in refusal("serve-live", "--model", str(MODEL), "--random-weights", *flags_before, *flags)


def test_a_model_without_weights_needs_modules_for_its_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(MODEL.read_text())
    with pytest.raises(BadInput, match="--module: expected model-0=PATH"):
        serve_live(model=ModelOptions(tmp_path), engine=EngineOptions(POOLS))


def test_a_worker_that_does_not_find_its_coordinator_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--role", "attention", "--rendezvous", "127.0.0.1:9", "--join-seconds", "0.1"]
    assert run(["serve-live", "--model", str(MODEL), "--random-weights", "--scenario", str(BUNDLE), *flags]) == 1
    assert capsys.readouterr().err == "serve-live: rank 0 (coordinator) has not come to 127.0.0.1:9 within 0.1 s\n"


PROMPT = [72, 5, 33, 120, 7, 61, 100, 4, 18, 3, 9, 27, 81, 44, 2, 11, 90, 1, 5, 77]
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 12, "prompt": PROMPT}


@pytest.fixture(scope="module")
def parts(
    checkpoint: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A model, and two adapters as the flag has them."""
    directory, folder = checkpoint("llama")[0], tmp_path_factory.mktemp("served-adapters")
    one = write_adapter(folder / "one", directory, 4, EVERY, 1)
    two = write_adapter(folder / "two", directory, 2, ATTENTION, 2)
    return directory, [f"one={one}", f"two={two}"]


def build(parts: tuple[Path, list[str]], max_loras: int | None = None) -> EngineBackend:
    source = ModelSource(parts[0], False, "float32", "cpu", 1)
    options = EngineOptions(
        max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks=64, lora_modules=parts[1], max_loras=max_loras
    )
    return engine_of_flags(source, options, "tiny")


def test_each_name_has_its_own_answers(parts: tuple[Path, list[str]]) -> None:
    expected = {}
    for model in ("tiny", "one", "two"):
        engine = build(parts).engine
        generation = make_generation(0, PROMPT, 12, sampling_params=SamplingParams(0.0), model=model)
        engine.submit(generation)
        while engine.step() is not None:
            pass
        expected[model] = generation.output
    assert len({tuple(row) for row in expected.values()}) == 3
    backend = build(parts, 2)
    engine = backend.engine
    with running(engine.executor.decoder, None, backend=backend) as server:
        for model in ("one", "tiny", "two", "one", None):  # the second time, one finds its own prompt in the cache
            fields = {} if model is None else {"model": model}
            answer = server.client.post("/v1/completions", **GREEDY, **fields)
            assert answer.status == 200, answer.body
            assert answer.document["choices"][0]["token_ids"] == expected[model or "tiny"]
        assert engine.core.model_loads == 2
        assert engine.core.cached_tokens == 32  # a block of one's, and one of the base model's
        listed = server.client.get("/v1/models").document["data"]
        assert [row["id"] for row in listed] == ["tiny", "one", "two"]
        assert server.client.post("/v1/completions", **GREEDY, model="three").status == 404


def test_flags_that_do_not_go_together(parts: tuple[Path, list[str]], refusal) -> None:
    with pytest.raises(BadInput, match="a name that the base model has not"):
        build((parts[0], [parts[1][0].replace("one=", "tiny=")]))
    with pytest.raises(BadInput, match="--max-loras"):
        build(parts, 0)
    assert "expected it beside --lora-modules" in refusal("serve-live", "--model", str(parts[0]), "--max-loras", "2")
