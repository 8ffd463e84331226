"""Tables of a compensated model: T_S by hand, both paths to a step's time, and refusals that say what is wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_models.io.config_io import checked, write_yaml
from latency_models.sources.ec_tables import LAYER_TYPES, EcTables, LayerTables, Selection, read_layer_tables
from schedulers.batches import Batch, Chunk
from schedulers.sequence import Sequence
from workloads.errors import BadInput
from workloads.request import Request

Document = dict[str, Any]

DOCUMENT: Document = {
    "schema": "twin.ec-tables/1",
    "layers": 4,
    "tokens": [1, 16, 64],
    "w4": {
        "qkv": [3e-4, 4e-4, 8e-4],
        "o": [1e-4, 1e-4, 3e-4],
        "gate_up": [5e-4, 6e-4, 9e-4],
        "down": [2e-4, 3e-4, 4e-4],
    },
    "ec": {
        "qkv": [5e-4, 7e-4, 9e-4],
        "o": [2e-4, 2e-4, 5e-4],
        "gate_up": [6e-4, 7e-4, 1e-3],
        "down": [3e-4, 4e-4, 5e-4],
    },
    "attention": [1e-4, 2e-4, 6e-4],
    "source": "made up",
}
PLAIN = [4 * layer_seconds for layer_seconds in (1.2e-3, 1.6e-3, 3.0e-3)]
"""W4 and attention of four layers."""
FULL = [4 * layer_seconds for layer_seconds in (1.7e-3, 2.2e-3, 3.5e-3)]
"""With compensators everywhere."""


def tables() -> LayerTables:
    return LayerTables.model_validate(DOCUMENT)


def sequence(number: int) -> Sequence:
    return Sequence(Request(id=number, arrival=0.0, prompt_tokens=500, max_tokens=9), number, False)


def batch(decodes: int, *chunks: int) -> Batch:
    prompts = [Chunk(sequence(1000 + n), tokens, 0, False) for n, tokens in enumerate(chunks)]
    return Batch(prompts, [sequence(n) for n in range(decodes)], 50 * decodes, 50)


# -- T_S ---------------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1))
def test_iteration_latency_is_linear_in_the_density(density: float) -> None:
    expected = [w + density * (e - w) for w, e in zip(PLAIN, FULL, strict=True)]
    assert tables().iteration(Selection(density=density)) == pytest.approx(expected)


def test_layers_by_name_add_what_each_of_them_costs() -> None:
    selection = Selection(layers={"qkv": [0, 3], "down": [1]})
    extra = [2 * 2e-4 + 1e-4, 2 * 3e-4 + 1e-4, 2 * 1e-4 + 1e-4]
    assert tables().iteration(selection) == pytest.approx([w + e for w, e in zip(PLAIN, extra, strict=True)])
    everywhere = Selection(layers={kind: [0, 1, 2, 3] for kind in LAYER_TYPES})
    assert tables().iteration(everywhere) == pytest.approx(FULL)


def test_between_the_points_it_is_linear_and_beyond_them_it_says_so() -> None:
    """From 16 to 64 tokens 5.6 ms more: at 28, a quarter of the way, 1.4 ms."""
    model = EcTables(tables(), Selection(density=0.0))
    assert model.at(16) == pytest.approx(6.4e-3)
    assert model.at(28) == pytest.approx(6.4e-3 + 1.4e-3)
    assert (model.at(0), model.at(1)) == (0.0, pytest.approx(4.8e-3))
    assert model.outside() == {}
    assert model.at(112) == pytest.approx(12e-3 + 5.6e-3)
    assert model.at(70) == pytest.approx(12e-3 + 0.7e-3)
    assert model.outside() == {"tokens": 112.0}


# -- a step ------------------------------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    """5 decodes and chunks of 16 + 12: T(5) + T(28) apart, T(33) together; padded to 40, T(5) + T(40) and T(40)."""
    by_tokens = {5: 4.8e-3 + 1.6e-3 * 4 / 15, 28: 7.8e-3, 33: 6.4e-3 + 5.6e-3 * 17 / 48, 40: 9.2e-3}
    expected = {
        ("separate", 0): by_tokens[5] + by_tokens[28],
        ("joint", 0): by_tokens[33],
        ("separate", 40): by_tokens[5] + by_tokens[40],
        ("joint", 40): by_tokens[40],
        ("joint", 30): by_tokens[33],  # more than that already
    }
    for (passes, pad_to), seconds in expected.items():
        model = EcTables(tables(), Selection(density=0.0), passes, pad_to)  # type: ignore[arg-type]
        assert model.seconds(batch(5, 16, 12)) == pytest.approx(seconds)
        assert model.seconds(batch(5)) == pytest.approx(by_tokens[5])  # decodes alone are not padded


def test_the_scheduler_s_table_is_this_one() -> None:
    model = EcTables(tables(), Selection(density=0.5))
    assert model.chunk_table() == ([1, 16, 64], [model.at(tokens) for tokens in (1, 16, 64)])


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_table_that_does_not_grow_is_none_for_the_scheduler() -> None:
    flat = copy.deepcopy(DOCUMENT)
    for name in ("w4", "ec"):
        for kind in LAYER_TYPES:
            flat[name][kind][2] = flat[name][kind][1] / 2
    model = EcTables(LayerTables.model_validate(flat), Selection(density=0.0))
    assert model.at(16) > 0  # a step can be timed with it
    with pytest.raises(BadInput, match=r"tokens\[2\].*grow.*at 64 after 0\.0064 s at 16"):
        model.chunk_table()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("tokens", [2, 16, 64], ["tokens[0]", "expected 1", "2"]),
        ("tokens", [1, 64, 64], ["tokens", "increase", "64 after 64"]),
        ("tokens", [1], ["tokens"]),
        ("w4.o", [1e-4, 1e-4], ["w4.o", "3 entries", "found 2"]),
        ("ec", {kind: [1.0] * 3 for kind in ("qkv", "o", "gate_up")}, ["ec.down", "missing"]),
        ("attention", [0.0], ["attention", "3 entries", "found 1"]),
        ("attention", [0.0, -1.0, 0.0], ["attention[1]", "-1"]),
        ("w4.qkv", [3e-4, 0.0, 8e-4], ["w4.qkv[1]", "0"]),
        ("layers", 0, ["layers", "0"]),
        ("source", "", ["source"]),
        ("schema", "twin.ec-tables/2", ["schema", "twin.ec-tables/2"]),
        ("w4.lm_head", [1.0] * 3, ["lm_head"]),
    ],
)  # fmt: skip
def test_a_file_that_breaks_the_schema_is_refused_by_field_and_value(
    path: str, value: Any, message: list[str], tmp_path: Path
) -> None:
    document = section = copy.deepcopy(DOCUMENT)
    *folders, last = path.split(".")
    for name in folders:
        section = section[name]
    section[last] = value
    file = tmp_path / "tables.yaml"
    file.write_text(write_yaml(document))
    with pytest.raises(BadInput) as error:
        read_layer_tables(file)
    line = str(error.value)
    assert line.startswith(str(file))
    assert "\n" not in line
    for item in message:
        assert item in line, line


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tables.yaml"
    file.write_text(write_yaml(tables().document()))
    assert read_layer_tables(file) == tables()


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({}, "either density or layers"),
        ({"density": 0.1, "layers": {}}, "either density or layers"),
        ({"density": 1.1}, "1.1"),
        ({"layers": {"qkv": [1, 1]}}, r"layers\.qkv.*\[1, 1\]"),
        ({"layers": {"mlp": [1]}}, "mlp"),
    ],
)
def test_a_selection_that_is_none(selection: Document, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        checked(Selection, selection, Path("s.yaml"))


def test_a_layer_that_the_model_lacks() -> None:
    with pytest.raises(BadInput, match=r"selection\.layers\.down: got 4, expected layers below 4"):
        EcTables(tables(), Selection(layers={"down": [0, 4]}))
