"""/openapi.json says what the server does: Schemathesis sends what it allows and what it forbids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import hypothesis
import pytest

from live.models.decoder import Decoder
from live.server.launcher import OPERATIONS
from live.server.protocol import Operation
from live.server.replies import INVALID
from tests.live.server.conftest import config, running

CHECKS = {"positive_data_acceptance": {"expected-statuses": ["2xx", "400", "404"]}}
"""400 too, since no schema can tell that a prompt and its answer fit the context; but not for what cannot be read."""

KEY = {"Authorization": "Bearer a-key"}
SETTINGS = hypothesis.settings(
    max_examples=hypothesis.settings().max_examples // 16, deadline=None, derandomize=True, database=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
)  # fmt: skip


@pytest.fixture(scope="module")
def schema(decoder: Decoder, folder: Path) -> Iterator[Any]:
    """The document of a server that wants a key."""
    schemathesis = pytest.importorskip("schemathesis", reason="the extra [test] has it")
    with running(decoder, folder, api_key="a-key", engine=config(num_gpu_blocks=16)) as setting:  # short contexts
        settings = schemathesis.Config.from_dict({"checks": CHECKS})
        yield schemathesis.openapi.from_url(f"{setting.client.base}/openapi.json", config=settings)
        assert setting.settled()


def drive(operation: Any, mode: Literal["positive", "negative"]) -> None:
    """Send what the document allows, or what it forbids, and check all that Schemathesis knows to check."""
    from schemathesis import GenerationMode

    @hypothesis.given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    @SETTINGS
    def holds(case: Any) -> None:
        response = case.call_and_validate(headers=KEY)
        if mode == "positive" and response.status_code == 400:
            assert response.json()["error"]["code"] != INVALID, "the schema allows what the server cannot read"

    holds()


FIRST_PATHS = {route.handler: route for route in reversed(OPERATIONS)}.values()
"""One path of each endpoint: the others are answered by the same function."""


@pytest.mark.parametrize("route", FIRST_PATHS, ids=lambda route: route.path)
def test_the_server_does_what_its_document_says(schema: Any, route: Operation) -> None:
    operation = schema[route.path][route.method]
    drive(operation, "positive")
    if route.body is not None:
        drive(operation, "negative")


def test_every_path_is_there(schema: Any) -> None:
    assert {(route.path, route.method.lower()) for route in OPERATIONS} == {
        (path, method) for path, operations in schema.raw_schema["paths"].items() for method in operations
    }
