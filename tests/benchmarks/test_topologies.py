"""`python -m benchmarks.topologies` compares the tokens of every run with one engine's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from benchmarks.topologies import first_difference, main  # noqa: E402
from live.generation import make_generation  # noqa: E402

TINY = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama.json"


def test_a_bundle_gives_the_tokens_of_one_engine(tmp_path: Path) -> None:
    out = tmp_path / "topologies.json"
    sizes = ["--batch-size", "2", "--prompt", "8", "--output", "4", "--repeats", "1"]
    assert main(["--device", "cpu", "--model", str(TINY), *sizes, "--out", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert list(runs) == ["one engine", "2A-1F, one stream, kernels", "2A-1F, one stream, graphs"]
    assert {row["different"] for row in runs.values()} == {0}


@pytest.mark.parametrize(
    ("tokens", "difference"),
    [([5, 6, 7], ""), ([5, 8, 1], "exchanged"), ([5, 9, 7], "different"), ([4, 6, 7], "different")],
)
def test_only_the_first_difference_counts(tokens: list[int], difference: str) -> None:
    """The second token's runner-up is 0.05 nats less likely, the first's by 1."""
    reference = make_generation(0, [1], 3, logprobs=2)
    reference.output += [5, 6, 7]
    reference.top_logprobs += [[(5, -1.0), (4, -2.0)], [(6, -1.0), (8, -1.05)], [(7, -1.0), (1, -3.0)]]
    assert first_difference(tokens, reference, 0.1) == difference
