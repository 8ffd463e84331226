"""Texts of users: ratios, overrides, ranges of values, and fields that vary together."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_models.io.config_io import checked
from latency_models.sources.linear import LinearStepTime
from scenarios.afd import parse_ratios
from scenarios.engine import EngineSpec
from scenarios.reading import apply, combinations, parse_overrides, parse_zipped
from twin.cli import run
from workloads.errors import BadInput


def ratios(text: str) -> list[float]:
    return [float(topology.ratio) for topology in parse_ratios(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", [8]),
        ("1:4", [1, 2, 3, 4]),
        ("1:9:4", [1, 5, 9]),
        ("1:2:1/2", [1, 1.5, 2]),
        ("7/2", [3.5]),
        ("3.5", [3.5]),
        ("1,2,4,2:3", [1, 2, 4, 3]),
        (" 1 , 2 ", [1, 2]),
        ("1/2", [0.5]),
        ("14/4,7/2", [3.5]),
    ],
)
def test_ratios(text: str, expected: list[float]) -> None:
    assert ratios(text) == expected


def test_a_ratio_is_a_bundle_in_lowest_terms() -> None:
    (topology,) = parse_ratios("14/4")
    assert (topology.attention_instances, topology.ffn_instances, str(topology)) == (7, 2, "7A-2F")


@given(st.lists(st.fractions(min_value=Fraction(1, 50), max_value=50, max_denominator=50), min_size=1, unique=True))
def test_any_list_of_fractions_is_read_back(values: list[Fraction]) -> None:
    assert [topology.ratio for topology in parse_ratios(",".join(map(str, values)))] == values


@given(st.text(max_size=12))
def test_ratios_are_read_or_refused(text: str) -> None:
    try:
        assert all(topology.ratio > 0 for topology in parse_ratios(text))
    except BadInput as error:
        assert "--ratio" in str(error)
        assert "\n" not in str(error)


def test_values_are_yaml_and_combine_in_order() -> None:
    overrides = parse_overrides(["a=1,2.5,true", "b.c={x: 1, y: [2, 3]},text", "d='1,2'"])
    assert overrides == {"a": [1, 2.5, True], "b.c": [{"x": 1, "y": [2, 3]}, "text"], "d": ["1,2"]}
    assert list(combinations({"a": [1, 2], "b": [3, 4]})) == [{"a": a, "b": b} for a in (1, 2) for b in (3, 4)]


def test_settings_reach_into_sections_and_leave_the_original_alone() -> None:
    document = {"a": {"b": 1, "c": 2}}
    assert apply(document, {"a.b": 5, "x.y.z": 1}) == {"a": {"b": 5, "c": 2}, "x": {"y": {"z": 1}}}
    assert document == {"a": {"b": 1, "c": 2}}
    with pytest.raises(BadInput, match=r"a\.b"):
        apply(document, {"a.b.c": 1})


@given(st.text(max_size=20))
def test_overrides_are_read_or_refused(text: str) -> None:
    try:
        parse_overrides([text])
    except BadInput as error:
        assert "--set" in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=" + "[" * 30_000, r"expected a YAML value: nested more than 100 deep$"),
        ("a=" + "- " * 30_000, r"expected a YAML value: nested more than 100 deep$"),
        ("seed=0x" + "f" * 5000, r"expected a YAML value: a whole number of more than 1023 bits$"),
        ("a" + ".a" * 30_000 + "=1", r"expected a key of at most 100 sections$"),
    ],
)
def test_an_override_that_would_exhaust_the_process_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse_overrides([text])


@pytest.mark.parametrize(
    ("command", "kind", "message"),
    [
        ("simulate", "afd-bundle", "expected serving; a scenario of kind afd-bundle is for twin sweep"),
        ("validate", "afd-bundle", "expected validation; a scenario of kind afd-bundle is for twin sweep"),
        ("validate", "serving", "expected validation; a scenario of kind serving is for twin simulate or twin sweep"),
        ("simulate", "validation", "expected serving; a scenario of kind validation is for twin validate"),
        ("sweep", "validation", "expected afd-bundle or serving; a scenario of kind validation is for twin validate"),
        ("sweep", "other", "expected afd-bundle or serving"),
    ],
)
def test_a_scenario_of_another_kind_is_refused_with_the_command_that_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, kind: str, message: str
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(f"kind: {kind}\nname: s\n")
    assert run([command, str(file)]) == 2
    assert capsys.readouterr().err == f"twin: {file}: kind: got {kind!r}, {message}\n"


@pytest.mark.parametrize(
    ("flag", "value", "kind", "message"),
    [
        (
            "--ratio",
            "1:4",
            "serving",
            "expected a scenario of kind afd-bundle; this one is of kind serving: "
            "run it with twin simulate, or sweep its fields with twin sweep --set FIELD=V1,V2",
        ),
        (
            "--replications",
            "3",
            "afd-bundle",
            "expected a scenario of kind serving; this one is of kind afd-bundle: sweep it with --ratio and --set",
        ),
    ],
)
def test_a_flag_of_another_kind_is_refused_with_how_this_kind_is_swept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, kind: str, message: str
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(f"kind: {kind}\nname: s\n")
    assert run(["sweep", str(file), flag, value]) == 2
    assert capsys.readouterr().err == f"twin: {file}: {flag}: {message}\n"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=5:20:5", [5, 10, 15, 20]),
        ("a=5:19:5", [5, 10, 15]),
        ("a=3:1:-1", [3, 2, 1]),
        ("a=0.1:0.4:0.1", [0.1, 0.2, 0.3, 0.4]),
        ("a=1:2:0.5", [1.0, 1.5, 2.0]),
        ("a=1,4:6:1,x", [1, 4, 5, 6, "x"]),
        ("a=5:5:1", [5]),
        ("a=1:32", ["1:32"]),  # two numbers are no range
        ("ratio=1:32:4", ["1:32:4"]),  # which has ranges of its own
        ("a='1:2:1'", ["1:2:1"]),
    ],
)
def test_a_range_is_its_numbers(text: str, values: list[Any]) -> None:
    ((_, result),) = parse_overrides([text]).items()
    assert result == values
    assert [type(value) for value in result] == [type(value) for value in values]


@pytest.mark.parametrize("text", ["a=1:5:0", "a=5:1:1", "a=1:5:-1"])
def test_a_step_that_leads_nowhere(text: str) -> None:
    with pytest.raises(BadInput, match=r"^--set: got '.*', expected start:stop:step with a step from start to stop$"):
        parse_overrides([text])


def test_a_range_of_too_many_numbers_is_refused_before_it_is_made() -> None:
    with pytest.raises(BadInput, match=r"^--set: got 'a=1:1e15:1', expected at most 10,000"):
        parse_overrides(["a=1:1e15:1"])


def test_zipped_fields_go_together_beside_every_combination_of_the_others() -> None:
    zipped = parse_zipped(["a=1,2 b=x,y", "c=3:4:1"])
    assert list(combinations({"d": [7, 8]}, zipped)) == [
        {"d": 7, "a": 1, "b": "x", "c": 3},
        {"d": 7, "a": 2, "b": "y", "c": 4},
        {"d": 8, "a": 1, "b": "x", "c": 3},
        {"d": 8, "a": 2, "b": "y", "c": 4},
    ]
    assert list(combinations({}, {})) == [{}]


def test_zipped_fields_need_as_many_values_and_a_key_once() -> None:
    with pytest.raises(BadInput, match=r"^--zip: .*expected as many values of each field, found: a has 2, b has 3$"):
        parse_zipped(["a=1,2", "b=1,2,3"])
    with pytest.raises(BadInput, match=r"^--zip: got 'a', expected each key once, in --set or in --zip$"):
        list(combinations({"a": [1]}, parse_zipped(["a=1,2"])))
    with pytest.raises(BadInput, match=r"^--zip: got 'a', expected key=value"):
        parse_zipped(["a"])
    with pytest.raises(BadInput, match=r"^--set: got 20000, expected at most 10,000"):
        list(combinations({"a": list(range(100))}, {"b": list(range(200))}))


def test_predicted_steps_keep_a_margin_for_their_scatter() -> None:
    """A step of n prompt tokens takes n ms. Of normal errors of 10 %, 99 % are below 2.33 deviations."""

    class Scattering(LinearStepTime):
        def scatter(self) -> float:
            return 0.1

    def largest(step_time: LinearStepTime, **changes: float) -> int:
        section = {"policy": "slo", "slo_seconds": 0.1, "min_tokens": 1} | changes
        policy = checked(EngineSpec, {"num_gpu_blocks": 10, "chunking": section}, None).chunking
        return policy.build(step_time).max_prefill_tokens(0)

    exact, scattering = LinearStepTime(0.0, 0.001), Scattering(0.0, 0.001)
    assert largest(exact) == 100
    assert largest(scattering) == 79
    assert largest(scattering, quantile=0.5) == 100
