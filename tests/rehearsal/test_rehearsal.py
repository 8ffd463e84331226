"""GPU code runs on a pretended GPU, and Triton compiles every kernel launch on the way.

In a process of its own: the pretended device takes PyTorch's place there, and the interpreter must not take Triton's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the live plant needs the extra [live]")
pytest.importorskip("triton", reason="kernels are Triton's")
if torch.cuda.is_available():
    pytest.skip("the real one is there", allow_module_level=True)

from tests.compiling import run_compiling  # noqa: E402
from tests.rehearsal.pieces import PIECES  # noqa: E402

COMMANDS = [name for name in PIECES if name.startswith(("twin ", "benchmarks."))]
ENGINES = [name for name in PIECES if name not in COMMANDS]


def rehearsed(*pieces: str) -> dict[str, dict[str, Any]]:
    process = run_compiling("-m", "tests.rehearsal", *pieces)
    assert process.returncode in (0, 4), process.stderr[-3000:]
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    return {row["piece"]: row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [ENGINES, COMMANDS], ids=["engines", "commands"])
def test_what_runs_on_a_gpu_runs_on_a_pretended_one(pieces: list[str], tmp_path: Path) -> None:
    result = rehearsed(*pieces, "--record", str(tmp_path / "launches.jsonl"))
    assert list(result) == pieces
    launches = (tmp_path / "launches.jsonl").read_text().splitlines(keepends=True)
    assert len(launches) >= max(row["launches"] for row in result.values())
    (tmp_path / "few.jsonl").write_text("".join(launches[:3]))
    out = tmp_path / "compiled.json"
    process = run_compiling("-m", "benchmarks.gpu_turn.precompile", str(tmp_path / "few.jsonl"), "--out", str(out))
    assert process.returncode == 0, process.stdout + process.stderr[-3000:]
    assert [row["error"] for row in json.loads(out.read_text())["launches"]] == ["", "", ""]
    for row in result.values():
        assert row["launches"] >= 10
        assert row["refused"] == {}
        assert row["replays"] > 0
    if "waiting" in result:  # a step ahead, the host waits for the tokens of each step and for nothing else
        row = result["waiting"]
        assert row["waits"] == {"an event": row["replays"]}
        assert row["graphs"] == 0


SLIPS = {
    "a tensor that was left on the host": "torch.ones(3, device='cuda') + torch.ones(3)",
    "a wait within a graph": "with_graph(lambda: torch.ones(3, device='cuda').sum().item())",
    "a copy from the host within a graph": "with_graph(lambda: torch.ones(3).to('cuda'))",
    "a kernel on the host's memory": "rms_norm(torch.ones(2, 64), torch.ones(64), 1e-6)",
    "a grid that no GPU takes": "silu_mul_kernel[(1, 70000)](x, x, 64, BLOCK=64)",
}
SETTING = """
from tests.rehearsal.gpu import PretendedGPU
from tests.rehearsal.launches import Launches
gpu = PretendedGPU()
launches = Launches(gpu)
import torch
from kernels.rms_norm.triton import rms_norm
from kernels.silu_mul.triton import silu_mul_kernel
x = torch.ones(64, device='cuda')
def with_graph(do):
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        do()
for slip in {slips!r}:
    try:
        exec(slip)
    except Exception as error:
        print(type(error).__name__)
    else:
        print("nothing")
"""


def test_slips_are_found() -> None:
    """The rehearsal itself: each of these passes on a CPU, and would not on a GPU."""
    process = run_compiling("-c", SETTING.format(slips=list(SLIPS.values())))
    assert process.returncode == 0, process.stderr[-3000:]
    assert dict(zip(SLIPS, process.stdout.splitlines(), strict=True)) == dict.fromkeys(SLIPS, "Refused") | {
        "a tensor that was left on the host": "FakeTensorDeviceMismatchError"
    }
