"""`twin report`: the page of any finished run drawn again from its folder, and folders that it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from latency_models.io.config_io import write_yaml
from tests.twin.conftest import SMALL
from tests.twin.serving.scenarios import scenario
from twin.cli import run

LINK = {"bandwidth": 2e9, "latency": 1e-3, "bytes_per_token": 131072}


@pytest.fixture
def here(file: Path) -> Path:
    (file.parent / "afd.yaml").write_text(SMALL)
    return file.parent


def finished_run(here: Path, *arguments: str) -> Path:
    """The folder of a run that has just been made."""
    assert run(list(arguments)) == 0
    (folder,) = (here / "runs").iterdir()
    return folder


def taken_away(folder: Path) -> tuple[dict[str, str], str]:
    """Figures and page of a run, removed from its folder."""
    page, figures = folder / "report.html", folder / "figures"
    texts = {file.name: file.read_text() for file in figures.iterdir()} if figures.exists() else {}
    for name in texts:
        (figures / name).unlink()
    text = page.read_text()
    page.unlink()
    return texts, text


def body(page: str) -> str:
    """A page without its manifest, which says when it was written."""
    return page[: page.index("<h2>How this was made")]


def reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    return (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("command", "figures"),
    [
        (["simulate", "s.yaml"], {"latencies.svg", "over-time.svg"}),
        (["simulate", "s.yaml", "--replications", "2", "--set", "detail=false"], set()),
        pytest.param(
            ["sweep", "s.yaml", "--jobs", "1", "--set", "engine.max_num_seqs=2,16"],
            {"sweep.svg"},
            marks=pytest.mark.slow,
        ),
        (["sweep", "afd.yaml", "--jobs", "1"], {"idle.svg", "regimes.svg", "throughput.svg"}),
    ],
)
def test_what_a_run_showed_is_drawn_again(
    here: Path, capsys: pytest.CaptureFixture[str], command: list[str], figures: set[str]
) -> None:
    folder = finished_run(here, *command)
    texts, page = taken_away(folder)
    assert set(texts) == figures
    again = reported(folder, capsys)
    assert body(again) == body(page)
    assert "<td>status</td><td>complete</td>" in again
    assert {name: (folder / "figures" / name).read_text() for name in figures} == texts
    for text in texts.values():
        assert ET.fromstring(text).tag.endswith("svg")


def test_a_run_without_figures_gets_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    system = {"layout": "disaggregated", "prefill_replicas": 1, "decode_replicas": 2, "link": LINK}
    (here / "s.yaml").write_text(write_yaml(scenario(system=system)))
    folder = finished_run(here, "simulate", "s.yaml", "--no-figures")
    assert not (folder / "report.html").exists()
    page = reported(folder, capsys)
    assert "Who ran and who waited" in page
    assert "<h2>Links</h2>" in page
    assert "decode-1" in page


def test_folders_that_are_no_runs(here: Path, refusal) -> None:
    assert "none: expected a run folder: No such file" in refusal("report", here / "none")
    assert "expected a run folder: No such file" in refusal("report", here)
    assert "expected a run folder: Not a directory" in refusal("report", here / "s.yaml")
    (here / "manifest.json").write_text("[]")
    assert "expected a run folder: manifest.json is no JSON object" in refusal("report", here)


def test_runs_that_are_not_finished(here: Path, refusal) -> None:
    folder = finished_run(here, "simulate", "s.yaml", "--no-figures")
    (folder / "summary.json").unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(
        json.dumps(manifest | {"status": "running", "command": "twin simulate s.yaml"})
    )
    message = refusal("report", folder)
    assert "expected a finished run, this one is not (running); the command was: twin simulate s.yaml" in message
    (folder / "manifest.json").write_text("{}")
    assert "(unknown); the command was: not said" in refusal("report", folder)


def enormous(value: Any) -> Any:
    """The same with whole numbers that no float can hold in place of all numbers."""
    if isinstance(value, dict):
        return {key: enormous(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [enormous(inner) for inner in value]
    return 10**309 if isinstance(value, int | float) and not isinstance(value, bool) else value


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda document: document.pop("engines"), "with the field 'engines'"),
        (lambda document: document["summary"].pop("ttft"), "with the field 'ttft'"),
        (lambda document: document.update(series=[1, 2]), "with other values"),
        (lambda document: document.update(series=enormous(document["series"])), "with other values (int too large"),
        (
            lambda document: document["summary"].update(enormous(document["summary"])),
            "with other values (int too large",
        ),
        (lambda document: document.update(schema="twin.simulation/9"), "schema: got 'twin.simulation/9', expected"),
        (lambda document: document.update(schema="twin.reproduction-page/1"), "expected the schema of a run"),
        (lambda document: document.update(schema="twin.reproduction-os.path/1"), "expected the schema of a run"),
        (lambda document: document.pop("schema"), "expected the schema of a run"),
    ],
)
def test_summaries_that_cannot_be_drawn(here: Path, refusal, spoil: Any, message: str) -> None:
    folder = finished_run(here, "simulate", "s.yaml", "--no-figures")
    document = json.loads((folder / "summary.json").read_text())
    spoil(document)
    (folder / "summary.json").write_text(json.dumps(document))
    error = refusal("report", folder)
    assert "summary.json" in error
    assert message in error
    assert not (folder / "report.html").exists()


def test_a_summary_cut_short(here: Path, refusal) -> None:
    folder = finished_run(here, "simulate", "s.yaml", "--no-figures")
    (folder / "summary.json").write_text((folder / "summary.json").read_text()[:200])
    assert "expected a run folder: summary.json is not JSON" in refusal("report", folder)
