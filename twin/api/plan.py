"""`twin.plan`: the deployment that meets goals, and `twin.compare`: two results side by side.

Questions of plans and the run folder that keeps what has been simulated are shared with the command line.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latency_models.deployment.hugging_face import any_model
from latency_models.io.files import name_on_command_line
from reports.run_directory import RunDirectory, fingerprint, open_run
from scenarios.reading import apply, read_scenario
from twin.api.inputs import (
    ExecutorChoice,
    Overrides,
    choose_executor,
    errors_name_arguments,
    path_of,
    require_above_0,
    settings_of,
)
from twin.api.run_folder import complete, figure, manifest, new_run
from twin.api.simulation import Result
from twin.planning.catalogue import CatalogueQuestion
from twin.planning.planner import Planner
from twin.planning.question import Question, read_question, with_changes
from twin.planning.space import Candidate
from twin.planning.windows import Simulations
from workloads.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from scenarios.reading import Settings
    from twin.planning.inventory import Demand, Option

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


def inventory_options(
    template: CatalogueQuestion, have: Mapping[str, int], demands: Sequence[Demand], settings: Settings
) -> tuple[dict[str, int], list[Option]]:
    """The GPUs that there are by the names of their hardware files, and each model and format on each of them.

    Formats of weights are those that `template` states, else all in which the model is published.
    """
    from twin.planning.inventory import Option

    keys = {name: name_on_command_line("hardware", "--have", name) for name in have}
    prices = {keys.get(name, name): price for name, price in template.prices.items()}
    options = []
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
                options.append(Option(demand.model, label, keys[name], question))
    return {keys[name]: number for name, number in have.items()}, options


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
    from twin.planning.given import candidates_of_answer, given_candidate, is_answer

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
    given = [(candidate.family.given, candidate.name) for candidate in candidates]
    inputs = {
        "scenario_file": str(question.path),
        **_inputs(question),
        "trace": None if question.trace is None else question.trace.name,
        "given": [deployment.sections | {"name": name} for deployment, name in given if deployment],
        **(inputs or {}),
    }
    content = manifest(inputs)
    identity = fingerprint([content["version"], inputs, str(question.path.parent)])
    with executor.start() as started, open_run(runs, kind, identity, content, resume=not fresh) as run:
        yield run, Simulations(run.points(), run.add_point, started)


OF_ROWS = ("summary", "intervals", "goals", "settings", "nodes")
"""Fields of a row that a DataFrame has as columns of their own, or not."""


@dataclass(frozen=True)
class PlanResult:
    """The answer of a plan: `document` is what `twin plan --json` prints. docs/reference/python.md has its columns."""

    document: Document
    _path: Path
    _inputs: Document

    def __repr__(self) -> str:
        return f"<{self.document['name']}: {self.answer}>"

    @property
    def answer(self) -> str:
        """The recommendation in a sentence, or that there is none."""
        return str(self.document["answer"])

    @property
    def feasible(self) -> bool:
        """True if some deployment meets the goals."""
        return bool(self.document["feasible"])

    @cached_property
    def deployments(self) -> pd.DataFrame:
        """One row for each deployment of the table, the recommendation first; a column for each goal and setting."""
        import pandas as pd

        return pd.DataFrame([_row(row) for row in self.document["rows"]])

    @cached_property
    def confidence(self) -> pd.DataFrame:
        """What confidence costs: one row for each confidence; the best estimate has none."""
        import pandas as pd

        return pd.DataFrame(self.document["confidence_curve"])

    @cached_property
    def candidates(self) -> pd.DataFrame:
        """One row for each candidate, with its status and the reason of it."""
        import pandas as pd

        return pd.DataFrame([_row(entry) for entry in self.document["ledger"]])

    def plot(self, kind: str = "pareto") -> Figure:
        """A matplotlib figure, `pareto`, `capacity` or `confidence`, for `savefig`; `BadInput` for another kind."""
        return figure(self.document, kind)

    def save(self, folder: str | Path, *, figures: bool = True) -> Path:
        """Write a run folder like that of `twin plan`; returns its path. `BadInput` if not empty, else `OSError`."""
        with new_run(folder, self._path, self._inputs, "twin.plan(…).save(…)") as run:
            complete(run, self.document, figures=figures)
        return run.path

    def _repr_html_(self) -> str:
        from html import escape

        html: str = self.deployments.to_html(na_rep="–")
        return f"<p>{escape(self.answer)}</p>{html}"


def plan(
    scenario: str | Path | None = None,
    overrides: Overrides | None = None,
    *,
    model: str | None = None,
    gpu: str | Sequence[str] | None = None,
    rate: float | None = None,
    slo: Mapping[str, float | str] | None = None,
    trace: str | Path | None = None,
    prompt_tokens: float | None = None,
    answer_tokens: float | None = None,
    prices: Mapping[str, float] | None = None,
    what: Iterable[str] = (),
    candidates: Iterable[str | Path] = (),
    brief: bool = False,
    cpu_limit: float | None = None,
    jobs: int | None = None,
    executor: str = "local",
) -> PlanResult:
    """Find the deployment that meets goals at the least cost. Prints nothing and writes nothing.

    Args:
        scenario: a file of kind `serving` with a section `plan`; None: `model` and what follows make the question.
        overrides: changed fields, as a mapping of dotted keys or as texts `key=value`.
        model, gpu, rate, prompt_tokens, answer_tokens: as the flags of `twin plan`; several GPUs as a list.
        slo: limits by goal, as `{"ttft_p99": "1s"}`. prices: of a GPU per hour, by its name.
        trace: file of the lengths. what: changed questions, as after `--what`.
        candidates: files whose deployments compete. brief: leave out headroom and what would change the answer.
        cpu_limit: CPU seconds of this process and its workers after which the answer is what has been decided.
        jobs, executor: as for `simulate`.

    Raises:
        BadInput: naming the file, the field or argument, the value and what was expected.
    """
    with errors_name_arguments():
        require_above_0("cpu_limit", cpu_limit)
        choice = choose_executor(executor, jobs)
        settings, file = settings_of(overrides), None if trace is None else path_of("trace", trace)
        if scenario is not None:
            settings |= {} if slo is None else {"plan.goals": dict(slo)}
            settings |= {} if rate is None else {"workload.arrivals.rate": rate}
            question = scenario_question(path_of("scenario", scenario), settings, file)
        else:
            if model is None or gpu is None or slo is None:
                raise BadInput("expected a scenario, or model, gpu and slo", field="scenario")
            names = [gpu] if isinstance(gpu, str) else list(gpu)
            stated = CatalogueQuestion(
                model, names, dict(slo), rate, file, prompt_tokens, answer_tokens, prices=prices or {}
            )
            question = catalogue_question(stated, settings)
        given = [deployment for path in candidates for deployment in deployments_of_file(Path(path), question)]
        variants = [(text, with_changes(question, text)) for text in what]
        with choice.start() as started:
            simulations = Simulations({}, lambda key, window: None, started, cpu_limit=cpu_limit or math.inf)
            answer = Planner(question, simulations, brief=brief, given=given, variants=variants).run()
        return PlanResult(answer.document(), question.path, _inputs(question))


def compare(first: Result | PlanResult, second: Result | PlanResult) -> pd.DataFrame:
    """One row for each metric that both have, with `first`, `second` and the relative `change`.

    They are metrics of two simulations, or of what two plans recommend; `BadInput` for a plan that recommends nothing.
    """
    import pandas as pd

    pair = pd.DataFrame({"first": _metrics("first", first), "second": _metrics("second", second)}).dropna()
    return pair.assign(change=pair["second"] / pair["first"] - 1).rename_axis("metric")


def _metrics(name: str, result: Result | PlanResult) -> dict[str, float | None]:
    from twin.api.frames import metrics

    if isinstance(result, Result):
        return metrics(result.document["summary"])
    row = result.document["recommendation"]
    if row is None:
        raise BadInput("expected a plan that recommends a deployment", field=name, value=result.document["name"])
    return {key: row[key] for key in ("gpus", "cost_per_hour", "sure")} | metrics(row["summary"])


def _row(row: Document) -> Document:
    plain = {name: value for name, value in row.items() if name not in OF_ROWS}
    goals = {goal["name"]: goal["value"] for goal in row.get("goals", ())}
    return {**plain, **row["settings"], **goals}


def _inputs(question: Question) -> Document:
    spec = question.spec.model_dump(mode="json")
    return {"scenario": question.document, "plan": spec, "seed": question.seed}
