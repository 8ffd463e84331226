"""Sections that are imported when a file has them: the same values and errors as those of any other section."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field

from latency_models.io.config_io import Strict, checked
from latency_models.io.late_section import late_section
from scenarios.memory import KVMemorySpec
from scenarios.sessions import RecordedSessionsSpec
from workloads.errors import BadInput

Memory = late_section("scenarios.memory", "KVMemorySpec")
Sessions = late_section("scenarios.sessions", "SessionsSpec")  # a union
Autoscaling = late_section("scenarios.overload", "Autoscaling")  # sections by name


class File(Strict):
    """Sections alone, in a list, and by name."""

    memory: Memory | None = None
    memories: list[Memory] = Field(default_factory=list)
    sessions: Sessions | None = None
    autoscaling: Autoscaling | None = None


class Now(Strict):
    """The same with a section that is imported at once."""

    memory: KVMemorySpec | None = None
    memories: list[KVMemorySpec] = Field(default_factory=list)


def test_values_are_instances_of_the_section() -> None:
    file = checked(File, {"memory": {"gpu_memory_utilization": 0.5}, "sessions": {"source": "prefix_ids"}}, None)
    assert file.memory == KVMemorySpec(gpu_memory_utilization=0.5)
    assert isinstance(file.sessions, RecordedSessionsSpec)
    assert file.model_dump(exclude_unset=True)["memory"] == {"gpu_memory_utilization": 0.5}
    assert checked(File, {"memory": file.memory}, None) == File(memory=file.memory)


@pytest.mark.parametrize(
    "document",
    [
        {"memory": {"gpu_memory_utilisation": 0.5}},
        {"memory": {"gpu_memory_utilization": 1.5}},
        {"memory": {"memory": 1e9}},
        {"memory": 7},
        {"memories": [{}, {"activations": "many"}]},
    ],
)
def test_errors_are_those_of_a_section_that_is_imported_at_once(document: dict[str, Any]) -> None:
    message = []
    for model in (File, Now):
        with pytest.raises(BadInput) as error:
            checked(model, document, None)
        message.append(str(error.value))
    assert message[0] == message[1]


def test_errors_in_a_union_and_by_name_say_where_they_are() -> None:
    with pytest.raises(BadInput, match=r"^sessions\.source: got 'here', expected one of "):
        checked(File, {"sessions": {"source": "here"}}, None)
    with pytest.raises(BadInput, match=r"^autoscaling\.decode\.min_replicas: got 0, expected "):
        checked(File, {"autoscaling": {"decode": {"policy": "slo", "min_replicas": 0, "max_replicas": 2}}}, None)
