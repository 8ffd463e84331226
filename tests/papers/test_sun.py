"""SUN: what low concurrency says of high, decode pools, and skew; and that nothing held out gets into a fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from latency_models.fitting.linear import LinearLatency
from papers.sun import pools as sun_pools
from papers.sun import reproduction as sun
from papers.sun.concurrency import (
    FITTED,
    FORMS,
    ISOLATED,
    SHARED,
    ConcurrencyRow,
    DecodeFit,
    all_rows,
    closed_loop,
    concurrency_rows,
    errors,
    fit_decode,
    fit_prompts,
    pool_rows,
    predict_engine,
    rows_of,
)
from papers.sun.concurrency import scenario as row_scenario
from papers.sun.pools import (
    Load,
    Outcome,
    choose,
    fitted_service,
    offered,
    predict_pools,
    scenario,
    simulate,
    summarise_skew,
)
from papers.sun.reproduction import figures as sun_figures
from papers.sun.reproduction import tables as sun_table
from tests.reports.rendering import lines_of
from twin.api.run_folder import draw
from twin.cli import run

ROOT = Path(__file__).parents[2]
MODELS = ("LLaMA3.1-8B", "Qwen3-8B-Base")


# -- Table 4 -----------------------------------------------------------------------------------------------------------


def planted_rows(line: DecodeFit, prompts: LinearLatency) -> Iterator[ConcurrencyRow]:
    """Table 4's settings of one model with the times that this line gives."""
    for row in rows_of(concurrency_rows(), MODELS[0]):
        loop = closed_loop(line, prompts, row)
        yield dataclasses.replace(row, ttft=loop.ttft, tpot=loop.tpot, throughput=loop.throughput)


def test_a_planted_line_is_found_again_and_predicts() -> None:
    line = DecodeFit({4: 6e-3, 16: 12e-3}, batching=4e-4, per_row=0.0, per_kv_token=9e-8, misfit=math.nan)
    prompts = LinearLatency().fit([0.0, 1e3, 1e4], [0.02, 0.09, 0.72])
    rows = list(planted_rows(line, prompts))
    fit = fit_decode(rows)
    assert fit.weights == pytest.approx(line.weights, rel=1e-9)
    assert (fit.batching, fit.per_kv_token) == pytest.approx((4e-4, 9e-8), rel=1e-9)
    assert fit.misfit < 1e-9
    assert fit_prompts(rows)[16].alpha_ == pytest.approx(7e-5)
    high = [row for row in rows if row.concurrency not in FITTED]
    assert [closed_loop(fit, prompts, row).tpot for row in high] == pytest.approx([row.tpot for row in high])
    # A line in which every row costs cannot be told from it at low concurrency and is slower at high.
    assert all(closed_loop(all_rows(fit), prompts, row).tpot > row.tpot + 1e-3 for row in high)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_held_out_rows_touch_no_parameter(model: str, form: Any) -> None:
    rows = rows_of(concurrency_rows(), model)
    spoilt = [
        row if row.concurrency in FITTED else dataclasses.replace(row, ttft=9.0, tpot=9.0, throughput=9.0)
        for row in rows
    ]
    assert sum(row.tpot == 9.0 for row in spoilt) == 9
    assert fit_decode(spoilt, form) == fit_decode(rows, form)
    before, after = fit_prompts(rows), fit_prompts(spoilt)
    assert [(line.alpha_, line.beta_) for line in before.values()] == [
        (line.alpha_, line.beta_) for line in after.values()
    ]
    prompts = before[16]
    for row, changed in zip(rows, spoilt, strict=True):
        fit = fit_decode(rows, form)
        assert closed_loop(fit, prompts, row) == closed_loop(fit, prompts, changed)
        assert row_scenario(row, fit, 1e-4, 1e-2) == row_scenario(changed, fit, 1e-4, 1e-2)


def test_concurrency_16_from_1_and_4() -> None:
    engines = [(model, method) for model in MODELS for method in ("Full-FT", "AWQ", "QSUN")]
    results = [result for engine in engines for result in predict_engine(*engine)]
    assert len(results) == 54
    held_out = [result for result in results if not result["fitted"]]
    assert len(held_out) == 18
    for metric in ("tpot", "throughput"):
        summary = errors(results, metric)
        assert summary["mean"] < 0.03
        assert abs(summary["worst"]) == max(
            abs(result["predicted"][metric] / result["published"][metric] - 1) for result in held_out
        )
        assert summary["worst_row"]["prompt"] == 4096
        assert set(summary["by_method"]) == {f"{model} {method}" for model, method in engines}
    for result in results:
        for metric in ("tpot", "throughput"):  # the simulation and the closed form: two ways to the same number
            assert result["predicted"][metric] == pytest.approx(result["closed_form"][metric], rel=0.01)
    assert errors(results, "ttft")["mean"] > 0.2  # known: the print's prompts wait for each other


# -- figures 3 and 4 ---------------------------------------------------------------------------------------------------


def test_pools_of_two_and_three_from_the_rows_of_four_and_one() -> None:
    service = fitted_service()
    pools = predict_pools(service, 256, 2)
    isolated, three, two, single = pools["rows"]
    assert pools["rate"] * 256 == pytest.approx(4 * 935)
    assert isolated["predicted"] == {"throughput": 935.0, "interactivity_change": 0.0}
    assert [row["fixes_the_load"] for row in pools["rows"]] == [True, False, False, True]
    for row in (three, two):
        assert abs(row["throughput_error"]) < 0.02
        assert abs(row["interactivity_points"]) < 0.03
    changes = [row["predicted"]["interactivity_change"] for row in pools["rows"]]
    assert changes == sorted(changes, reverse=True)
    assert single["predicted"]["interactivity_change"] < -0.3
    longer = predict_pools(service, 512, 2)
    assert choose([longer, pools])["answer"] == 256
    blind = [{**pool, "rows": [pool["rows"][0], None, None, pool["rows"][3]]} for pool in (longer, pools)]
    assert choose(blind)["answer"] == 256


def test_skew_hurts_isolated_workers_and_not_the_pool() -> None:
    service = fitted_service()
    runs = {
        placement: [simulate(service, 14.61, placement, zipf, 1)[0] for zipf in (0.0, 1.0, 2.0)]
        for placement in (ISOLATED, SHARED)
    }
    for metric in ("throughput", "interactivity"):
        isolated, together = ([getattr(run, metric) for run in runs[placement]] for placement in (ISOLATED, SHARED))
        assert isolated[0] > isolated[1] > isolated[2]
        assert together == pytest.approx([together[0]] * 3, rel=0.02)
        assert isolated[2] < 0.9 * isolated[0]
        assert isolated[2] < 0.9 * together[2]
    assert runs[ISOLATED][2].achieved < 0.9 < runs[SHARED][2].achieved


def test_sizes_of_the_effect_are_worked_out_by_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sun_pools, "SKEWS", (0.0, 2.0))
    even = [Outcome(1000.0, 0.02, 0.1, 50.0, 1.0), Outcome(2000.0, 0.02, 0.1, 50.0, 1.0)]
    worse = [Outcome(900.0, 0.04, 0.1, 30.0, 0.9), Outcome(1600.0, 0.04, 0.1, 30.0, 0.8)]
    points: dict[sun_pools.Point, list[Outcome]] = {
        (ISOLATED, 0.0): even, (ISOLATED, 2.0): worse, (SHARED, 0.0): even, (SHARED, 2.0): even,
    }  # fmt: skip
    summary = summarise_skew(points, 7.0)
    change, gain, interactivity, by_mean = summary["sizes"]
    assert change["predicted"] == pytest.approx(-0.15)  # of -10 % and -20 %
    # Student's t of 97.5 % with one degree of freedom, the deviation of the pair, and one run beside the mean of two
    reach = 12.7062 * math.sqrt(0.005) * math.sqrt(1.5)
    assert change["one_run"] == pytest.approx([-0.15 - reach, -0.15 + reach], rel=1e-4)
    assert gain["predicted"] == pytest.approx((1 / 0.9 + 1 / 0.8) / 2 - 1)
    assert interactivity["predicted"] == pytest.approx(50 / 30 - 1)
    assert by_mean["predicted"] == pytest.approx(1.0)
    assert summary["falls"] == {"throughput": True, "interactivity": True}
    swapped = summarise_skew({**points, (ISOLATED, 0.0): worse, (ISOLATED, 2.0): even}, 7.0)
    assert swapped["falls"] == {"throughput": False, "interactivity": False}


# -- examples and the whole --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [ISOLATED, SHARED])
def test_examples_are_the_scenarios_of_figure_4(placement: Any) -> None:
    service = fitted_service()
    rate = offered(pool_rows()[0], 256).rate
    expected = scenario(service, Load(rate, sun_pools.ANSWER), placement)
    example = yaml.safe_load((ROOT / "examples" / f"sun-{placement}.yaml").read_text())
    assert example.pop("description")
    if placement == ISOLATED:  # one for each model, which goes without saying
        assert expected["system"].pop("decode_replicas") == 1
    flat, target = dict(leaves(example)), dict(leaves(expected))
    assert flat.keys() == target.keys()
    for key, value in target.items():
        assert flat[key] == (pytest.approx(value, rel=1e-3) if isinstance(value, float | int) else value), key


def leaves(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_the_isolated_example_degrades_by_the_command_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example = str(ROOT / "examples" / "sun-isolated.yaml")
    assert (
        run(["sweep", example, "--set", "workload.models.zipf=0,0.5,1,1.5,2", "--no-figures", "--json", "--jobs", "1"])
        == 0
    )
    points = yaml.safe_load(capsys.readouterr().out)["points"]
    throughput = [point["summary"]["output_throughput"] for point in points]
    tpot = [point["summary"]["tpot"]["mean"] for point in points]
    assert throughput == sorted(throughput, reverse=True)
    assert tpot == sorted(tpot)
    assert throughput[-1] < 0.9 * throughput[0]


def test_the_whole_reproduction_on_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sun_pools, "ANSWERS", (256, 512))
    monkeypatch.setattr(sun_pools, "SKEWS", (0.0, 2.0))
    messages: list[str] = []
    document = sun.reproduce(1, messages.append, replications=2)
    assert document["schema"] == "twin.reproduction-sun/1"
    assert len(messages) == 6 + 2 + 4
    assert document["skew"]["rate"] == document["pool"]["chosen"]["rate"]
    claims = {(claim["where"], claim["what"]): claim for claim in document["claims"]}
    assert len(claims) == len(document["claims"]) == 16
    # The row of one worker is too slow in the twin by more than the goal, and the document says so.
    assert claims["figure 3", "1 shared: interactivity"]["agrees"] is False
    assert claims["figure 3", "2 shared: interactivity"]["agrees"] is True
    text = "\n".join(lines_of(sun_table(document)))
    assert "1 shared: interactivity: -48 % printed" in text.partition("What disagrees")[2]
    assert "2 shared: interactivity" not in text
    figures, page = draw(document, {"command": "twin reproduce sun"})
    assert figures == sun_figures(document)
    for svg in figures.values():
        assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert page.count("<figure><svg") == len(figures) == 3
    assert "1 shared: interactivity: -48 % printed" in page
