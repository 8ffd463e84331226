"""Plans and maximum loads: their questions, and the run folder that keeps what has been simulated."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latency_models.deployment.hugging_face import any_model
from latency_models.io.builtin_files import name_on_command_line
from reports.records.run_directory import RunDirectory, fingerprint, open_run
from scenarios.overrides import apply
from scenarios.reading import read_scenario
from twin.api.run_folder import complete, manifest
from twin.planning.planner import Simulations
from twin.planning.question import Question, read_question
from twin.planning.space import Candidate

if TYPE_CHECKING:
    from scenarios.overrides import Settings
    from twin.executors.executor import ExecutorChoice
    from twin.planning.catalogue import CatalogueQuestion
    from twin.planning.inventory import Combination, Demand, Inventory
    from twin.planning.result import MaxLoad, Plan

Document = dict[str, Any]

REPLICATIONS = 8
"""Windows that decide on a rate of an inventory, at most: many rates are compared."""


def scenario_question(scenario: Path, settings: Settings, trace: Path | None = None) -> Question:
    """The question of a scenario file with a section `plan`."""
    return read_question(read_scenario(scenario, "serving"), settings, scenario, trace)


def catalogue_question(catalogue: CatalogueQuestion, settings: Settings, changes: Document | None = None) -> Question:
    """The question of a model on GPUs of the hardware catalogue; `changes` are of fields of its document."""
    from twin.planning.catalogue import of_every_engine, scenario_of

    document = scenario_of(catalogue) | (changes or {})
    return read_question(document, of_every_engine(settings, document), Path("plan"))


def inventory_questions(
    template: CatalogueQuestion, have: Mapping[str, int], demands: Sequence[Demand], settings: Settings
) -> tuple[dict[str, int], list[Combination]]:
    """The GPUs that there are by the names of their hardware files, and a question of each model and format on each.

    Formats of weights are those that `template` states, else all in which the model is published.
    """
    from twin.planning.inventory import Combination

    keys = {name: name_on_command_line("hardware", "--have", name) for name in have}
    prices = {keys.get(name, name): price for name, price in template.prices.items()}
    combinations = []
    for demand in demands:
        for name, number in have.items():
            for published, weights, label in _formats(demand.model, template.weights):
                part = replace(
                    template,
                    model=published,
                    gpus=[keys[name]],
                    weights=(weights,),
                    prices={keys[name]: prices[keys[name]]} if keys[name] in prices else {},
                    max_gpus=number,
                    objective="throughput",
                )
                title = re.sub(r"[^\w.-]+", "-", f"{demand.model}-in-{label}-on-{keys[name]}")
                question = catalogue_question(part, {"plan.replications": REPLICATIONS, **settings}, {"name": title})
                combinations.append(Combination(demand.model, label, keys[name], question))
    return {keys[name]: number for name, number in have.items()}, combinations


def _formats(model: str, stated: Sequence[str | None]) -> list[tuple[str, str | None, str]]:
    """Formats of a model's weights: the name that means one, what to state beside it, and how it is called."""
    name = name_on_command_line("models", "--model", model)
    described = any_model(name)
    if any(stated):
        return [(name, weights, str(weights or described.formats())) for weights in stated]
    formats = {str(described.formats()): name}
    for checkpoint in described.checkpoints:
        formats.setdefault(str(checkpoint.formats), checkpoint.repository or name)
    return [(published, None, label) for label, published in formats.items()]


def deployment_question(
    scenario: Path, settings: Settings, goals: Mapping[str, float | str], trace: Path | None = None
) -> tuple[Question, Candidate]:
    """The question of the load of a scenario's own deployment, and the deployment."""
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
    inputs: Mapping[str, Any] | None = None,
) -> Iterator[tuple[RunDirectory, Simulations]]:
    """A run folder that keeps windows as they are simulated, or the unfinished one of equal question and `inputs`."""
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
        **(inputs or {}),
    }
    content = manifest(inputs)
    identity = fingerprint([content["version"], inputs, str(question.path.parent)])
    with executor.start() as started, open_run(runs, kind, identity, content, resume=not fresh) as run:
        yield run, Simulations(run.points(), run.add_point, started)


def save(run: RunDirectory, result: Plan | MaxLoad | Inventory, *, figures: bool = False) -> Document:
    """Write the document of a result, and its figures and page; the run is complete then."""
    return complete(run, result.document(), figures=figures)
