"""Sources are found by folder, and read by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import PositiveFloat

from latency_models import sources
from latency_models.io.config_io import Strict, checked
from latency_models.sources import registry
from latency_models.sources.linear import LinearSpec, LinearStepTime
from latency_models.sources.registry import SOURCES, SourceSpec, StepTimeSpec, register
from latency_models.step_time import StepTime
from workloads.errors import BadInput


class File(Strict):
    step_time: StepTimeSpec


class ConstantSpec(SourceSpec):
    """A user's source."""

    source: Literal["constant"]
    step: PositiveFloat

    def build(self, base: Path) -> StepTime:
        return LinearStepTime(self.step, 0.0)

    def provenance(self) -> dict[str, Any]:
        return {"source": self.source}


@pytest.fixture
def constant() -> Iterator[None]:
    """The user's source, registered after the union of sources was made."""
    register(ConstantSpec)
    yield
    del SOURCES["constant"]


def read(**section: Any) -> SourceSpec:
    return checked(File, {"step_time": section}, Path("scenario.yaml")).step_time


def fault(**section: Any) -> str:
    with pytest.raises(BadInput) as error:
        read(**section)
    return str(error.value)


def test_every_source_is_registered_under_the_name_of_its_file_or_folder() -> None:
    (home,) = sources.__path__
    names = {path.stem for path in Path(home).iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert names - {"__init__", "registry"} == registry.built_in_sources().keys()


def test_a_section_becomes_the_class_of_its_source() -> None:
    spec = read(source="linear", overhead=0.5)
    assert spec == LinearSpec(source="linear", overhead=0.5)
    assert isinstance(spec.build(Path()), LinearStepTime)


def test_an_unknown_source_is_answered_with_all_names() -> None:
    message = fault(source="guess")
    assert message.startswith("scenario.yaml: step_time.source: got 'guess', expected one of ")
    for name in SOURCES:
        assert f"'{name}'" in message


def test_a_misspelt_field_is_answered_with_the_nearest_of_its_source() -> None:
    expected = "scenario.yaml: step_time.overhed: unknown field, did you mean overhead? (and 1 more)"
    assert fault(source="linear", overhed=1.0) == expected


@pytest.mark.usefixtures("constant")
def test_a_source_registered_later_is_read_too() -> None:
    spec = read(source="constant", step=0.25)
    assert isinstance(spec, ConstantSpec)
    assert spec.step == 0.25
    assert fault(source="constant", step=-1.0) == "scenario.yaml: step_time.step: got -1.0, expected a number above 0"


@pytest.mark.usefixtures("constant")
def test_a_source_registered_later_is_written_with_its_own_fields() -> None:
    file = checked(File, {"step_time": {"source": "constant", "step": 0.25}}, Path("scenario.yaml"))
    assert file.model_dump(mode="json") == {"step_time": {"source": "constant", "step": 0.25}}


@pytest.mark.usefixtures("constant")
def test_a_name_stands_for_one_source() -> None:
    class Other(ConstantSpec):
        pass

    with pytest.raises(ValueError, match="expected a name that is not taken, found constant"):
        register(Other)


def test_one_file_among_the_sources_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_second.py").write_text(
        "from typing import Literal\n"
        "from latency_models.sources.linear import LinearStepTime\n"
        "from latency_models.sources.registry import SourceSpec, register\n"
        "@register\n"
        "class HalfSecondSpec(SourceSpec):\n"
        "    source: Literal['half_second']\n"
        "    def build(self, base):\n"
        "        return LinearStepTime(0.5, 0.0)\n"
        "    def provenance(self):\n"
        "        return {'source': self.source}\n"
    )
    monkeypatch.setattr(sources, "__path__", [*sources.__path__, str(tmp_path)])
    try:
        assert "half_second" in registry.built_in_sources()
        assert read(source="half_second").build(Path()).decode_seconds(3, 30, 10, 2) == [0.5, 0.5]
    finally:
        SOURCES.pop("half_second", None)
        sys.modules.pop("latency_models.sources.half_second", None)
