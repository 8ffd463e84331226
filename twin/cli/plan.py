"""`twin plan`: from a workload and goals to a deployment."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.cli import plan_options as flags
from twin.cli.console import ExecutorOptions, Fresh, RunOptions, note, print_run, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reports.run_directory import RunDirectory
    from twin.api.inputs import ExecutorChoice
    from twin.planning.catalogue import CatalogueQuestion
    from twin.planning.day import DayTask
    from twin.planning.planner import Planner
    from twin.planning.question import Question
    from twin.planning.windows import Simulations, Trial

Goals = dict[str, float | str]

INFEASIBLE, UNDECIDED = 3, 5
"""Exit codes: no candidate meets the goals; the CPU limit was reached before one was confirmed."""


def plan(
    scenario: Path | None = None,
    /,
    *,
    question: flags.QuestionOptions = flags.QuestionOptions(),  # noqa: B008 (frozen)
    catalogue: flags.CatalogueOptions = flags.CatalogueOptions(),  # noqa: B008 (frozen)
    target: flags.ObjectiveOptions = flags.ObjectiveOptions(),  # noqa: B008 (frozen)
    answer: flags.AnswerOptions = flags.AnswerOptions(),  # noqa: B008 (frozen)
    day: flags.DayOptions = flags.DayOptions(),  # noqa: B008 (frozen)
    fresh: Fresh = False,
    execution: ExecutorOptions = ExecutorOptions(),  # noqa: B008 (frozen)
    run: RunOptions = RunOptions(),  # noqa: B008 (frozen)
) -> int:
    """Find the deployment that meets goals at the least cost: how many GPUs, which parallelism, together or apart.

    Candidates are pruned by bounds and estimates, and decided by simulation, all with the same requests. The answer
    says with which confidence it meets the goals, how much more load it bears, and what would change it. Leaves a run
    folder with manifest, windows, summary, figures and an HTML report. The same command resumes a killed plan. Exit
    code 3 if no candidate meets the goals; the nearest miss is shown then.

    Args:
        scenario: Scenario file (YAML) of kind serving with a section plan, for example examples/plan-tiny.yaml. Without
            one, --model, --gpu, --rate, --slo and --trace make the question, and step times are computed from data
            sheets.
    """
    from scenarios.reading import goals_of_texts, single_settings
    from twin.api.inputs import choose_executor, require_above_0, require_at_least

    executor = choose_executor(execution.executor, execution.jobs)
    require_above_0("--cpu-limit", answer.cpu_limit)
    require_at_least("--max-gpus", target.max_gpus, 1)
    require_at_least("--node-size", target.node_size, 1)
    settings, goals = single_settings(question.set_ or []), goals_of_texts(question.slo or [])
    asked = _Asked(settings, goals, question, catalogue, target, answer, day, executor, fresh, run)
    if day.day is not None:
        unused = {**catalogue.flags, **target.flags, **answer.flags, "--rate": question.rate}
        _refuse(unused, "with --day, which compares fleets of the scenario's own deployment")
        return _day(flags.required("SCENARIO", scenario), asked)
    _refuse(day.flags, "without --day")
    asked.set("plan.confidence", target.confidence)
    asked.set("plan.commitments", flags.commitments_of_texts(target.commitment))
    asked.set("plan.api", flags.api_price_of_text(target.api_price))
    if catalogue.have:
        limits = {"--gpu": catalogue.gpu, "--max-gpus": target.max_gpus, "--objective": target.objective}
        files = {"SCENARIO": scenario, "--candidate": answer.candidate, "--write": answer.write}
        only = {"--what": answer.what, "--cpu-limit": answer.cpu_limit}
        _refuse({**files, **limits, **only}, "with --have, which asks what these GPUs serve")
        return _inventory(asked)
    if answer.max_load:
        unused = {**catalogue.flags, "--candidate": answer.candidate, "--objective": target.objective}
        unused |= {"--max-gpus": target.max_gpus, "--write": answer.write, "--what": answer.what}
        unused |= {"--cpu-limit": answer.cpu_limit}
        _refuse(unused, "with --max-load, which asks about the scenario's own deployment")
        asked.set("workload.arrivals.rate", flags.rate_of_text(question.rate))
        asked.set("plan.node_size", target.node_size)
        return _max_load(flags.required("SCENARIO", scenario), asked)
    return _plan(_question(scenario, asked), asked)


@dataclass(frozen=True)
class _Asked:
    """The flags of the command. `settings`: changed fields of the scenario, by `--set` and by other flags."""

    settings: dict[str, Any]
    goals: Goals
    question: flags.QuestionOptions
    catalogue: flags.CatalogueOptions
    target: flags.ObjectiveOptions
    answer: flags.AnswerOptions
    day: flags.DayOptions
    executor: ExecutorChoice
    fresh: bool
    run: RunOptions

    def set(self, field: str, value: object) -> None:
        """Change a field if its flag is given."""
        if value is not None:
            self.settings[field] = value


def _question(scenario: Path | None, asked: _Asked) -> Question:
    from twin.api.plan import catalogue_question, scenario_question

    options, catalogue, target = asked.question, asked.catalogue, asked.target
    if scenario is None:
        model = flags.required("--model", flags.single("--model", catalogue.model, "with --have"))
        gpus, rate = flags.required("--gpu", catalogue.gpu), flags.rate_of_text(options.rate)
        if options.trace is None:
            flags.required("--rate", rate)
        return catalogue_question(_catalogue_question(model, gpus, rate, asked), asked.settings)
    _refuse(catalogue.flags, "beside a scenario, whose section plan says it")
    asked.set("plan.goals", asked.goals or None)
    asked.set("workload.arrivals.rate", flags.rate_of_text(options.rate))
    asked.set("plan.limits.gpus", target.max_gpus)
    asked.set("plan.objective", target.objective)
    asked.set("plan.node_size", target.node_size)
    return scenario_question(scenario, asked.settings, options.trace)


def _catalogue_question(model: str, gpus: list[str], rate: float | None, asked: _Asked) -> CatalogueQuestion:
    from twin.planning.catalogue import CatalogueQuestion

    catalogue, target = asked.catalogue, asked.target
    return CatalogueQuestion(
        model=model,
        gpus=gpus,
        goals=flags.required("--slo", asked.goals or None),
        rate=rate,
        trace=asked.question.trace,
        prompt_tokens=catalogue.prompt_tokens,
        answer_tokens=catalogue.answer_tokens,
        hit_rate=catalogue.hit_rate,
        degrees=flags.whole_numbers("--tensor-parallel", catalogue.tensor_parallel or "1,2,4,8"),
        stages=flags.whole_numbers("--pipeline-parallel", catalogue.pipeline_parallel or "1"),
        replicas=flags.whole_numbers("--data-parallel", catalogue.data_parallel) if catalogue.data_parallel else None,
        layouts=(catalogue.layout or "colocated,disaggregated").split(","),
        weights=catalogue.weights.split(",") if catalogue.weights else (None,),
        cache=catalogue.cache or "bf16",
        chunks=flags.whole_numbers("--chunk", catalogue.chunk or "512,1024,2048,4096,8192"),
        prices=flags.by_name("--price", catalogue.price or [], "a price, or GPU=PRICE", gpus),
        max_gpus=target.max_gpus,
        node_size=target.node_size,
        objective=target.objective,
    )


def _plan(question: Question, asked: _Asked) -> int:
    from twin.api.plan import deployments_of_file, planning_run
    from twin.api.run_folder import complete
    from twin.planning.planner import Planner
    from twin.planning.question import with_changes

    answer, run = asked.answer, asked.run
    variants = [(text, with_changes(question, text)) for text in answer.what or []]
    candidates = [deployment for path in answer.candidate or [] for deployment in deployments_of_file(path, question)]
    opened = planning_run(question, candidates, run.runs, asked.executor, fresh=asked.fresh)
    with opened as (folder, simulations):
        simulations.cpu_limit = math.inf if answer.cpu_limit is None else answer.cpu_limit
        planner = Planner(
            question, simulations, lambda trial: _note_better(trial, planner), answer.brief, candidates, variants
        )
        windows_left = None if question.spec.aim == "throughput" or variants else planner.windows_left
        with _evaluating(folder, simulations, windows_left):
            result = planner.run()
        if answer.write is not None and planner.best is not None:
            from twin.planning.manifests import write_deployment

            write_deployment(planner, answer.write)
            note(f"deployment: {answer.write}")
        document = complete(folder, result.document(), figures=not run.no_figures)
        if document["stop"] is not None:
            folder.abandon("stopped at --cpu-limit")
            note(f"stopped at --cpu-limit {simulations.cpu_limit:g}: the same command without it goes on")
    return _print(document, as_json=run.json)


def _inventory(asked: _Asked) -> int:
    from twin.api.plan import inventory_options, planning_run
    from twin.api.run_folder import complete
    from twin.planning.inventory import demands_of, divide

    run = asked.run
    have = flags.counts_by_name("--have", asked.catalogue.have or [], "GPU=NUMBER, as h100=2")
    demands = demands_of(flags.required("--model", asked.catalogue.model), asked.question.rate or [])
    template = _catalogue_question(demands[0].model, list(have), 1.0, asked)
    have, options = inventory_options(template, have, demands, asked.settings)
    wanted = {"have": have, "demands": [[demand.model, demand.rate] for demand in demands]}
    opened = planning_run(
        options[0].question, [], run.runs, asked.executor, fresh=asked.fresh, kind="inventory", inputs=wanted
    )
    with opened as (folder, simulations):
        with _evaluating(folder, simulations):
            result = divide(have, demands, options, simulations, brief=asked.answer.brief)
        document = complete(folder, result.document(), figures=not run.no_figures)
    return _print(document, as_json=run.json)


def _max_load(scenario: Path, asked: _Asked) -> int:
    from twin.api.plan import deployment_question, planning_run
    from twin.api.run_folder import complete
    from twin.planning.planner import find_max_load

    question, deployment = deployment_question(scenario, asked.settings, asked.goals, asked.question.trace)
    opened = planning_run(question, [deployment], asked.run.runs, asked.executor, fresh=asked.fresh, kind="max-load")
    with opened as (folder, simulations):
        with _evaluating(folder, simulations):
            result = find_max_load(question, deployment, simulations)
        document = complete(folder, result.document(), figures=False)
    return _print(document, as_json=asked.run.json)


def _day(scenario: Path, asked: _Asked) -> int:
    from scenarios.reading import apply, read_scenario
    from twin.api.inputs import require_at_least
    from twin.api.run_folder import complete
    from twin.cli.runs import open_folder
    from twin.planning.day import plan_day, prepare_day, run_day
    from twin.serving.results.report import run_inputs

    options, run = asked.day, asked.run
    days = 3 if options.days is None else options.days
    require_at_least("--days", days, 1)
    outages = None if options.mttf is None else flags.seconds_of_text("--mttf", options.mttf)
    back = None if options.mttr is None else flags.seconds_of_text("--mttr", options.mttr)
    spot = None if options.spot is None else flags.spot_of_text(options.spot)
    share = 0.95 if options.minutes is None else options.minutes
    document = apply(read_scenario(scenario, "serving"), asked.settings)
    question = prepare_day(
        document, scenario, str(options.day), asked.goals, outages, back, spot, share, days, asked.question.trace,
        options.energy_price, options.max_kw,
    )  # fmt: skip
    inputs = question.stated | run_inputs([question.base], days, None)
    opened = open_folder("plan", run.runs, inputs, question.fingerprint, fresh=asked.fresh)
    with asked.executor.start() as started, opened as folder:
        points = folder.points()
        _note_resumed(folder.path, len(points))
        with progress("evaluating", None, 0) as advance:

            def simulate(tasks: Sequence[DayTask]) -> None:
                with started.each_as_done(run_day, tasks) as results:
                    for task, point in results:
                        folder.add_point(task.key, point)
                        points[task.key] = point
                        advance(task.key)

            document = plan_day(question, points, simulate)
        document = complete(folder, document, figures=not run.no_figures)
    return _print(document, as_json=run.json)


@contextmanager
def _evaluating(
    folder: RunDirectory, simulations: Simulations, remaining: Callable[[], int] | None = None
) -> Iterator[None]:
    """Show progress while windows are simulated. `remaining`: a bound of those to come."""

    _note_resumed(folder.path, len(simulations.store))
    with progress("evaluating", None, 0, remaining=remaining) as advance:
        simulations.advance = lambda key: advance("")
        yield


def _print(document: dict[str, Any], *, as_json: bool) -> int:

    print_run(document, as_json=as_json)
    return {True: 0, False: INFEASIBLE, None: UNDECIDED}[document["feasible"]]


def _refuse(values: dict[str, Any], why: str) -> None:
    for flag, value in values.items():
        if value is not None:
            from workloads.errors import BadInput

            raise BadInput(f"expected none {why}", field=flag, value=value)


def _note_resumed(folder: Path, count: int) -> None:

    if count:
        note(f"taking up {folder}: {count} windows are done")


def _note_better(trial: Trial, planner: Planner) -> None:
    """Note a better deployment on stderr, as soon as it is found."""

    candidate = trial.candidate
    settings = "".join(f", {key} {value}" for key, value in candidate.family.settings)
    final = trial.draws or not planner.search.evaluator.can_draw(candidate)
    estimated = "" if final else " by the best estimate of the step times"
    note(f"candidate that meets the goals{estimated}: {candidate.devices} ({candidate.family.parallelism}{settings})")
