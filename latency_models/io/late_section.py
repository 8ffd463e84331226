"""Sections of a file whose models are imported when a file has them.

A scenario may have sections for planning, sessions, autoscaling and more, each of which takes milliseconds to import
and to make a validator for. Most files have none of them. A model refers to such a section by its place:

    if TYPE_CHECKING:
        from scenarios.planning import PlanSpec
    else:
        PlanSpec = late_section("scenarios.planning", "PlanSpec")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationError
from pydantic_core import core_schema

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler


class LateSection:
    """Base class of the types that stand for a section in the annotations of a model."""

    module: ClassVar[str]
    name: ClassVar[str]

    @classmethod
    def annotation(cls) -> Any:
        """The type of the section: a model, or a union, list or dict of some. Imports it."""
        return getattr(import_module(cls.module), cls.name)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(cls._check)

    @classmethod
    def _check(cls, value: Any) -> Any:
        from pydantic import TypeAdapter

        from latency_models.io.validation_errors import explain_validation

        annotation = cls.annotation()
        try:
            return TypeAdapter(annotation).validate_python(value)
        except ValidationError as error:
            raise explain_validation(error, None, annotation) from None


def late_section(module: str, name: str) -> type[LateSection]:
    """A type that stands for the section `name` of `module`, which is imported when a file has it."""
    return type(name, (LateSection,), {"module": module, "name": name})


def late_sections(module: str, *names: str) -> list[type[LateSection]]:
    """Types that stand for several sections of one module."""
    return [late_section(module, name) for name in names]
