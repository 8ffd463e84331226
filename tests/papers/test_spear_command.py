"""SPEAR from the command line: the example scenario, and `twin reproduce spear`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from latency_models.sources.ec_tables import LayerTables, Selection
from papers.spear import published as spear_published
from papers.spear import reproduction as spear
from papers.spear import tables as spear_tables
from papers.spear.published import DENSITIES, slo_rows, static_rows
from papers.spear.reproduction import Study
from papers.spear.tables import GRID, READINGS, Reading, Sampling, Setting
from twin.cli import run

ROOT = Path(__file__).parents[2]

# -- the example -------------------------------------------------------------------------------------------------------

EXAMPLE = ROOT / "examples" / "spear-slo.yaml"


def test_the_example_is_the_scenario_that_rows_are_simulated_with() -> None:
    example = yaml.safe_load(EXAMPLE.read_text())
    step_time = example.pop("step_time")
    chunking = Setting(Reading("separate", beside_decodes=True), None, "synthetic").chunking(slo_rows()[1])
    expected = spear_tables.scenario(chunking, step_time, synthetic=True)
    del expected["step_time"]
    assert example == expected
    assert step_time["selection"] == {"density": DENSITIES["mid"]}
    tables = LayerTables.model_validate(step_time["tables"])
    assert (tables.tokens, tables.layers) == (list(GRID), spear_published.LAYERS)
    at_once = tables.iteration(Selection(density=spear_published.SINGLE_TOKEN_DENSITY))[0]
    assert at_once == pytest.approx(spear_published.SINGLE_TOKEN, rel=1e-3)
    for entries in (tables.w4, tables.ec):
        for kind, weights in spear_tables.WEIGHTS.items():
            share = weights / sum(spear_tables.WEIGHTS.values())
            total = [sum(entries[layer][i] for layer in spear_tables.WEIGHTS) for i in range(len(GRID))]
            assert entries[kind] == pytest.approx([share * layer for layer in total], rel=1e-3)


def test_the_example_s_tables_give_the_static_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ",".join(f"{{policy: static, tokens: {tokens}, exclude_decodes: true}}" for tokens in (512, 128))
    more = ["--no-figures", "--json", "--jobs", "1", "--replications", "2"]
    assert run(["sweep", str(EXAMPLE), "--set", f"engine.chunking={sizes}", *more]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    printed = [row.p99_itl for row in static_rows() if row.density == "mid" and row.chunk in (512, 128)]
    assert [point["summary"]["itl"]["p99"] for point in points] == pytest.approx(printed, rel=0.04)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_with_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = Study(
        readings=READINGS[:1], samplings=(Sampling("vllm"), Sampling("prompt up to", 512)),
        screening=(1, 1), fitting=(2, 1), refining=(2, 1), predicting=2, alternatives=1,
    )  # fmt: skip
    monkeypatch.setattr(spear, "Study", lambda: tiny)
    monkeypatch.setattr(spear_tables, "REQUESTS", 40)
    generator = np.random.default_rng(1)
    lengths = generator.lognormal(5.6, 0.8, (2, 400)).astype(int) + 1
    lines = ["prompt_tokens,output_tokens", *(f"{a},{b}" for a, b in lengths.T)]
    Path("t.csv").write_text("\n".join(lines) + "\n")
    assert run(["reproduce", "spear", "--trace", "t.csv", "--jobs", "1", "--json"]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert "twin: predicting (18 of 18)" in output.err
    assert document["workload"]["sampling"] in {"vllm", "prompt up to 512"}
    folder = tmp_path / document["run"]["directory"]
    assert json.loads((folder / "summary.json").read_text()) == document
    assert {file.name for file in (folder / "figures").iterdir()} == {"tradeoff.svg", "iteration.svg"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["paper"], manifest["trace"], manifest["complete"]) == ("spear", "t.csv", True)
