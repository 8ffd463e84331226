"""What users write: ratios and overrides."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scenarios.afd import parse_ratios
from scenarios.overrides import apply, combinations, parse_overrides
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
    assert list(combinations({"a": [1, 2], "b": [3, 4]})) == [
        {"a": 1, "b": 3},
        {"a": 1, "b": 4},
        {"a": 2, "b": 3},
        {"a": 2, "b": 4},
    ]
    assert list(combinations({})) == [{}]


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
