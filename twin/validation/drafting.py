"""Measures what an engine drafts at each position of its answers, and how much of it is right, before the replays.

The answers are to other requests of the workload than those that are replayed. Of the latter only the lengths are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from reports.records.run_directory import RunDirectory
from scenarios.validation import ValidationScenario
from twin.serving.engine.draft_outcomes import DraftOutcomes, document
from twin.serving.plan.plan import ServingPlan
from twin.serving.run.simulation import realisation
from twin.sweeps.serving_sweep import prepare
from twin.validation.backend import Backend

FILE = "draft-outcomes.json"


def measured_drafts(
    backend: Backend, scenario: ValidationScenario, base: Path, run: RunDirectory, note: Callable[[str], None]
) -> Path:
    """Measure the outcomes of drafts in the longest answers, once a run folder: `twin.draft-outcomes/1`."""
    file, spec = run.path / FILE, scenario.engine.speculative_config
    assert spec is not None
    if "drafts" in run.points():
        return file
    plan = _workload(scenario, base)
    count = min(scenario.profiling.answers, plan.workload.recorded or scenario.profiling.answers)
    note(f"measuring drafts in {count} answers")
    answered = realisation(replace(plan, requests=count), scenario.repeats + 1)
    replayed = (answer for repeat in range(scenario.repeats) for _, answer in realisation(plan, repeat))
    longest = max(*replayed, *(answer for _, answer in answered))
    drafts = backend.measure_drafts(scenario.engine.build(base), [(request, longest) for request, _ in answered])
    outcomes = DraftOutcomes(list(drafts))
    settings = spec.model_dump(
        include={"method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}
    )  # fmt: skip
    source = f"{count} answers of the live engine to other requests than those that are replayed"
    run.write_json(FILE, document(outcomes, settings, source))
    proposed, by_position = outcomes.shares(spec.num_speculative_tokens)
    run.add_point("drafts", {"answers": count, "proposed": proposed, "acceptance_by_position": by_position})
    shares = ", ".join(f"{100 * share:.0f} %" for share in by_position)
    note(f"{100 * proposed:.0f} % of decodes have a draft; its tokens are right in {shares} of them, by position")
    return file


def _workload(scenario: ValidationScenario, base: Path) -> ServingPlan:
    """A plan with the scenario's workload, which does not speculate."""
    serving = scenario.serving_without_times()
    serving["engine"]["speculative_config"] = None
    return prepare(serving, base / "scenario").cases[0].plan
