"""A chunk policy with parameters of its own, in one file: `plugins/alternating.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.twin.serving.scenarios import records, run, scenario
from workloads.errors import BadInput

PLUGIN = Path(__file__).parent / "plugins" / "alternating.py"


def document(chunking: Any) -> dict[str, Any]:
    workload = {"arrivals": {"process": "poisson", "rate": 40.0}}
    return scenario(plugins=[str(PLUGIN)], workload=workload, engine={"chunking": chunking})


def test_a_scenario_names_it_with_its_parameters() -> None:
    often, seldom = (records(run(document({"policy": "alternating", "every": n})))["first_token"] for n in (1, 5))
    assert sum(seldom) > sum(often)


@pytest.mark.parametrize(
    ("chunking", "message"),
    [
        ({"policy": "alternating"}, "expected parameters of alternating: .*missing 1 required .*: 'every'"),
        ({"policy": "alternating", "every": 0}, "expected parameters of alternating: expected every of at least 1"),
        ({"policy": "sometimes"}, "expected one of static, slo, alternating"),
        ("static", "engine.chunking: got .static., expected a section of fields"),
        (512, "engine.chunking: got 512, expected a section"),
        ({"policy": "static"}, "engine.chunking.tokens: expected this field, which is missing"),
        ([512], "engine.chunking: got .*, expected a section"),
        ({"policy": ["static"]}, "engine.chunking.policy: got .*, expected text"),
    ],
)
def test_what_it_does_not_take_is_refused_in_one_line(chunking: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run(document(chunking))
