"""SPEAR's claims about quality: printed values, what holds of given results, and the whole run at the smallest size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from papers.spear.published import quality_rows
from papers.spear.quality import claims, printed_recovery, shifts
from twin.api.run_folder import draw
from twin.cli import run

if TYPE_CHECKING:
    from papers.spear.training import Cell

OTHERS = ("random", "uniform", "all", "gate_off", "corpus", "svd", "whitened")


def results(**recovered: tuple[float, float]) -> list[dict[str, Any]]:
    """Rows of RTN at 4 bits and two seeds: a gap from 10 to 20, of which variants recover half or what is given."""
    rows = []
    for seed in range(2):
        variants: dict[str, Any] = {
            name: {"recovered": recovered.get(name, (0.5, 0.5))[seed]} for name in ("spear", *OTHERS)
        }
        quartiles = [{"gate_loss": 0.1 * quarter * (1 + seed)} for quarter in range(4)]
        variants["spear"] |= {
            "perplexity_float": 20 - 10 * recovered.get("exact", recovered.get("spear", (0.5, 0.5)))[seed],
            "quartiles": quartiles,
        }
        rows.append(
            {
                "seed": seed,
                "cell": "rtn-4-pc",
                "full": {"perplexity": 10.0},
                "quantised": {"perplexity": 20.0},
                "share_llama_2_7b": 0.005,
                "variants": variants,
            }
        )
    return rows


def claims_by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {claim["what"]: claim for claim in claims(rows, quality_rows())}


def test_printed_shares_of_the_gap() -> None:
    shares = printed_recovery(quality_rows(), 4)
    # "Llama-2-7B from 6.56 to 5.92, closing 60 % of the gap to FP16 (5.50)"; 3B 56 %; 1B 75 % (section 5.2).
    assert shares["Table 1", "Llama-2-7B", "wikitext2"] == pytest.approx(0.604, abs=1e-3)
    assert shares["Table 1", "Llama-3.2-3B", "wikitext2"] == pytest.approx(0.563, abs=1e-3)
    assert shares["Table 1", "Llama-3.2-1B", "wikitext2"] == pytest.approx(0.750, abs=1e-3)
    # Table 12's own column: 95.2, 73.8, 71.2 and 77.4 %.
    two = printed_recovery(quality_rows(), 2)
    assert sorted(round(100 * share, 1) for share in two.values()) == [71.2, 73.8, 77.4, 95.2]


def test_a_difference_must_show_over_seeds() -> None:
    name = "placement by CKA above random placement at 4 bits"
    assert claims_by_name(results(spear=(0.70, 0.71)))[name]["agrees"] is True
    assert claims_by_name(results(spear=(0.51, 0.90)))[name]["agrees"] is False  # the interval has both signs
    assert claims_by_name(results())[name]["agrees"] is False


def test_goals_without_intervals() -> None:
    name = "SPEAR's share of the gap at 4 bits"
    assert claims_by_name(results(spear=(0.65, 0.76)))[name]["agrees"] is True
    assert claims_by_name(results(spear=(0.65, 0.74)))[name]["agrees"] is False
    name = "placement by CKA against all modules at twice the memory at 4 bits"
    assert claims_by_name(results(all=(0.53, 0.53)))[name]["agrees"] is True
    assert claims_by_name(results(all=(0.55, 0.55)))[name]["agrees"] is False
    name = "INT8 against compensators in float32 at 4 bits"
    assert claims_by_name(results(exact=(0.505, 0.505)))[name]["agrees"] is True
    missed = claims_by_name(results(exact=(0.52, 0.52)))[name]
    assert missed["agrees"] is False
    assert missed["value"] == pytest.approx(-0.02)


def test_shifts_of_the_damage_s_order() -> None:
    damage = {f"layers.{i}.o": float(i) for i in range(10)}
    rows = [{"cell": "rtn-4-pc", "damage": damage}, {"cell": "awq-4-pc", "damage": damage | {"layers.0.o": 8.5}}]
    (shift,) = shifts(rows)
    # Ranks 1 to 8 move down by one, rank 0 goes up to 8: Σ d² = 8 + 64.
    assert shift["spearman"] == pytest.approx(1 - 6 * 72 / 990)
    assert shift["jaccard"] == pytest.approx(2 / 4)  # the top three: 7, 8, 9 and 8, 9, 0


@pytest.fixture
def smallest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of few steps on a small folder of sources, in the current folder."""
    pytest.importorskip("torch", reason="trainings need the extra [live]")
    from live.adaptation import language_model as runs
    from live.adaptation.compensators import CalibrationSettings
    from live.adaptation.language_model import Corpus
    from live.adaptation.training import TrainingSettings
    from papers.spear import training as sizes

    training = TrainingSettings(steps=2, batch_size=4, learning_rate=1e-3)
    text = dataclasses.replace(sizes.STUDY_SIZES["reduced"].text, layers=2, hidden=32, window=16, training=training)
    size = dataclasses.replace(
        sizes.STUDY_SIZES["reduced"], text=text, windows=8, sequences=8, rounded=8, diagnosed=4, full_rank=4,
        calibration=CalibrationSettings(training, training),
    )  # fmt: skip
    monkeypatch.setitem(sizes.STUDY_SIZES, "reduced", size)
    words = "\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(40))
    monkeypatch.setattr(runs, "read_corpus", lambda root: Corpus((words,), (words[::-1],), "a few lines", "0"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("smallest")
def test_the_whole_run_is_taken_up_where_it_was_stopped_and_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from papers.spear import training as study

    compensate, calls = study.compensate, []

    def stopping(cell: Cell, *arguments: Any) -> dict[str, Any]:
        calls.append(cell.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compensate(cell, *arguments)

    monkeypatch.setattr(study, "compensate", stopping)
    command = ["reproduce", "spear", "--quality", "--seeds", "1", "--jobs", "1"]
    assert run(command) == 130
    assert "3 finished points are kept" in capsys.readouterr().err
    assert run([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = [cell.name for cell in study.STUDY_SIZES["reduced"].cells]
    assert [row["cell"] for row in document["cells"]] == names
    assert len(calls) == len(names) + 1  # one was stopped, and is run again
    variants = document["cells"][0]["variants"]
    assert variants.keys() == {"spear", *OTHERS}
    budget = document["cells"][0]["budget"]
    assert all(row["bytes"] <= budget for name, row in variants.items() if name != "all")
    assert variants["all"]["bytes"] in (2 * budget, 2 * budget + 1)
    assert variants["random"]["modules"] == variants["spear"]["modules"]
    folder = Path(document["run"]["directory"])
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["complete"] is True
    figures, page = draw(document, manifest)
    assert figures.keys() == {"quality", "quartiles", "cka_maps", "losses"}
    for name, svg in figures.items():
        ElementTree.fromstring(svg)
        assert (folder / "figures" / f"{name}.svg").read_text() == svg
    assert "What disagrees" in page
    assert "placement by CKA above random placement at 3 bits" in page
