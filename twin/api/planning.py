"""Plans and maximum loads: their questions, and the run folder that keeps what has been simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.records.run_directory import RunDirectory, fingerprint, open_run
from scenarios.reading import read_scenario
from twin.api.run_folder import complete, manifest
from twin.planning.planner import Simulations
from twin.planning.question import Question, read_question
from twin.planning.space import Candidate

if TYPE_CHECKING:
    from scenarios.overrides import Settings
    from twin.executors.executor import ExecutorChoice
    from twin.planning.catalogue import CatalogueQuestion
    from twin.planning.result import MaxLoad, Plan

Document = dict[str, Any]


def scenario_question(scenario: Path, settings: Settings, trace: Path | None = None) -> Question:
    """The question of a scenario file with a section `plan`."""
    return read_question(read_scenario(scenario, "serving"), settings, scenario, trace)


def catalogue_question(catalogue: CatalogueQuestion, settings: Settings) -> Question:
    """The question of a model on GPUs of the hardware catalogue."""
    from twin.planning.catalogue import of_every_engine, scenario_of

    document = scenario_of(catalogue)
    return read_question(document, of_every_engine(settings, document), Path("plan"))


def deployment_question(
    scenario: Path, settings: Settings, goals: Mapping[str, float | str], trace: Path | None = None
) -> tuple[Question, Candidate]:
    """The question of the load of a scenario's own deployment, and the deployment."""
    from scenarios.overrides import apply
    from twin.planning.given import given_candidate, plan_of_given

    document = apply(read_scenario(scenario, "serving"), settings)
    question = read_question(plan_of_given(document, goals), {}, scenario, trace)
    return question, given_candidate(document, scenario, question, scenario.stem)


def deployments_of_file(path: Path, question: Question) -> list[Candidate]:
    """The deployment of a scenario file, or those of AIConfigurator's answer, as candidates of a plan."""
    from twin.planning.aiconfigurator import candidates_of_answer, is_answer
    from twin.planning.given import given_candidate

    if is_answer(path):
        return candidates_of_answer(path, question)
    return [given_candidate(read_scenario(path, "serving"), path, question, path.stem)]


@contextlib.contextmanager
def planning_run(
    question: Question,
    candidates: Sequence[Candidate],
    runs: Path,
    executor: ExecutorChoice,
    *,
    fresh: bool,
    kind: str = "plan",
) -> Iterator[tuple[RunDirectory, Simulations]]:
    """A run folder that keeps windows as they are simulated, or the unfinished one of the same question."""
    inputs = {
        "scenario_file": str(question.path),
        "scenario": question.document,
        "plan": question.spec.model_dump(mode="json"),
        "seed": question.seed,
        "trace": None if question.trace is None else question.trace.name,
        "given": [
            candidate.family.given.sections | {"name": candidate.name}
            for candidate in candidates
            if candidate.family.given
        ],
    }
    content = manifest(inputs)
    identity = fingerprint([content["version"], inputs, str(question.path.parent)])
    with executor.start() as started, open_run(runs, kind, identity, content, resume=not fresh) as run:
        yield run, Simulations(run.points(), run.add_point, started)


def save(run: RunDirectory, result: Plan | MaxLoad, *, figures: bool = False) -> Document:
    """Write the document of a result, and its figures and page; the run is complete then."""
    return complete(run, result.document(), figures=figures)
