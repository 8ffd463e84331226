"""Unions: pydantic's name of the member it tried never shows, a field of the same name always does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, Field, model_validator

from latency_models.io.config_io import Strict, checked
from workloads.errors import BadInput


class Circle(Strict):
    radius: int
    str: int = 0
    Square: int = 0

    @model_validator(mode="after")
    def _lucky(self) -> Circle:
        if self.radius == 13:
            raise BadInput("expected luck", field="radius", value=13)
        return self


class Square(Strict):
    side: float
    Circle: int = 0


class Near(Strict):
    kind: Literal["near"]
    near: int = 0
    Near: int = 0

    @model_validator(mode="after")
    def _lucky(self) -> Near:
        if self.near == 13:
            raise BadInput("expected luck", field="near", value=13)
        return self


class Far(Strict):
    kind: Literal["far", "remote"]
    far: int = 0


def _a_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Place = Annotated[Near | Far, Field(discriminator="kind")]


class Drawing(Strict):
    shape: Circle | Square | None = None
    shapes: list[Circle | int] = Field(default_factory=list)
    named: dict[str, Circle | Square | int] = Field(default_factory=dict)
    size: Annotated[int, Field(gt=0)] | Annotated[str, Field(min_length=2)] = 1
    rate: Annotated[float, Field(gt=0)] | Literal["auto", "max"] = 1.0
    many: list[int] | dict[str, int] | str = ""
    span: Annotated[tuple[float, float], BeforeValidator(_a_list)] | Literal["all"] = "all"
    pair: tuple[int, Place] | None = None
    place: Place | None = None
    places: Place | Annotated[list[Place], Field(min_length=1)] | int = 0
    class_: Place | None = Field(None, alias="class")
    by_name: dict[str, Place] = Field(default_factory=dict)


FAULTS: list[tuple[dict[str, Any], str]] = [
    # a section is judged as the member that it is nearest to
    ({"shape": {"radius": "x"}}, "shape.radius: got 'x', expected a whole number"),
    ({"shape": {"radius": 1, "str": "x"}}, "shape.str: got 'x', expected a whole number"),
    ({"shape": {"radius": 1, "Square": "x"}}, "shape.Square: got 'x', expected a whole number"),
    ({"shape": {"side": 1.0, "Circle": "x"}}, "shape.Circle: got 'x', expected a whole number"),
    ({"shape": {"side": 1.0, "Circel": 1}}, "shape.Circel: unknown field, did you mean Circle?"),
    ({"shape": {}}, "shape.radius: expected this field, which is missing"),
    ({"shape": {"radius": 13}}, "shape.radius: got 13, expected luck"),
    ({"shape": 5}, "shape: got 5, expected a section of fields"),
    ({"shapes": [1, {"radius": "x"}]}, "shapes[1].radius: got 'x', expected a whole number"),
    ({"shapes": [1, "x"]}, "shapes[1]: got 'x', expected a section of fields or a whole number"),
    ({"named": {"Circle": {"radius": "x"}}}, "named.Circle.radius: got 'x', expected a whole number"),
    ({"named": {"int": {"side": "x"}}}, "named.int.side: got 'x', expected a number"),
    ({"named": {"int": "x"}}, "named.int: got 'x', expected a section of fields or a whole number"),
    # members that are no sections
    ({"size": 0}, "size: got 0, expected a number above 0"),
    ({"size": "x"}, "size: got 'x', expected text, not less than 2 characters"),
    ({"size": 1.5}, "size: got 1.5, expected a whole number or text"),
    ({"rate": 0}, "rate: got 0, expected a number above 0"),
    ({"rate": "min"}, "rate: got 'min', expected a number or 'auto' or 'max'"),
    ({"many": [1, "x"]}, "many[1]: got 'x', expected a whole number"),
    ({"many": {"str": "x"}}, "many.str: got 'x', expected a whole number"),
    ({"many": 5}, "many: got 5, expected a list or a section of fields or text"),
    ({"span": [1.0, "x"]}, "span[1]: got 'x', expected a number"),
    ({"pair": (1, {"kind": "far", "far": "x"})}, "pair[1].far: got 'x', expected a whole number"),
    # members told apart by a tag, which may be the name of a field, too
    ({"place": {"kind": "near", "near": "x"}}, "place.near: got 'x', expected a whole number"),
    ({"place": {"kind": "near", "Near": "x"}}, "place.Near: got 'x', expected a whole number"),
    ({"place": {"kind": "near", "near": 13}}, "place.near: got 13, expected luck"),
    ({"place": {"kind": "remote", "fra": 1}}, "place.fra: unknown field, did you mean far?"),
    ({"place": {"kind": "far", "nera": 1}}, "place.nera: unknown field, expected one of kind, far"),
    ({"place": {"kind": 5}}, "place.kind: got '5', expected one of 'near', 'far', 'remote'"),
    ({"places": {"kind": "near", "near": "x"}}, "places.near: got 'x', expected a whole number"),
    ({"places": [{"kind": "near", "near": "x"}]}, "places[0].near: got 'x', expected a whole number"),
    ({"places": {"kind": "moon"}}, "places.kind: got 'moon', expected one of 'near', 'far', 'remote'"),
    ({"class": {"kind": "near", "near": "x"}}, "class.near: got 'x', expected a whole number"),
    ({"by_name": {"near": {"kind": "near", "near": "x"}}}, "by_name.near.near: got 'x', expected a whole number"),
    ({"by_name": {"near": 5}}, "by_name.near: got 5, expected a section of fields"),
]


@pytest.mark.parametrize(("document", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_the_field_is_what_the_user_wrote(document: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as error:
        checked(Drawing, document, Path("drawing.yaml"))
    assert str(error.value) == f"drawing.yaml: {message}"


def test_other_fields_are_counted_and_other_members_of_a_union_are_not() -> None:
    with pytest.raises(BadInput) as error:
        checked(Drawing, {"shape": {"radius": "x"}, "size": 0, "place": {"kind": "moon"}}, None)
    assert str(error.value) == "shape.radius: got 'x', expected a whole number (and 2 more)"


def test_unknown_fields_come_first_wherever_they_are() -> None:
    with pytest.raises(BadInput) as error:
        checked(Drawing, {"size": 0, "shpae": {}}, None)
    assert str(error.value) == "shpae: unknown field, did you mean shape? (and 1 more)"
