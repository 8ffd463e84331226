"""`twin plan`: from a workload and goals to a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.cli.options import ExecutorOptions, Fresh, RunOptions
from twin.cli.plan_options import (
    AnswerOptions,
    CatalogueOptions,
    DayOptions,
    ObjectiveOptions,
    QuestionOptions,
    api_price_of_text,
    by_name,
    commitments_of_texts,
    counts_by_name,
    rate_of_text,
    required,
    seconds_of_text,
    single,
    spot_of_text,
    whole_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scenarios.overrides import Settings
    from twin.executors.executor import ExecutorChoice
    from twin.planning.catalogue import CatalogueQuestion
    from twin.planning.day import DayTask
    from twin.planning.planner import Planner
    from twin.planning.question import Question
    from twin.planning.trial import Trial

Goals = dict[str, float | str]

INFEASIBLE = 3
"""Exit code: no candidate meets the goals."""


def plan(
    scenario: Path | None = None,
    /,
    *,
    question: QuestionOptions = QuestionOptions(),  # noqa: B008 (frozen)
    catalogue: CatalogueOptions = CatalogueOptions(),  # noqa: B008 (frozen)
    target: ObjectiveOptions = ObjectiveOptions(),  # noqa: B008 (frozen)
    answer: AnswerOptions = AnswerOptions(),  # noqa: B008 (frozen)
    day: DayOptions = DayOptions(),  # noqa: B008 (frozen)
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
    from scenarios.overrides import goals_of_texts, single_settings
    from twin.api.arguments import require_at_least

    executor = execution.choose()
    require_at_least("--max-gpus", target.max_gpus, 1)
    require_at_least("--node-size", target.node_size, 1)
    settings: Settings = single_settings(question.set_ or [])
    goals = goals_of_texts(question.slo or [])
    if day.day is not None:
        unused = {**catalogue.flags, **target.flags, **answer.flags, "--rate": question.rate}
        _refuse(unused, "with --day, which compares fleets of the scenario's own deployment")
        return _day(required("SCENARIO", scenario), settings, goals, question.trace, day, run, executor, fresh=fresh)
    _refuse(day.flags, "without --day")
    settings |= _set("plan.confidence", target.confidence)
    settings |= _set("plan.commitments", commitments_of_texts(target.commitment))
    settings |= _set("plan.api", api_price_of_text(target.api_price))
    if catalogue.have:
        limits = {"--gpu": catalogue.gpu, "--max-gpus": target.max_gpus, "--objective": target.objective}
        files = {"SCENARIO": scenario, "--candidate": answer.candidate, "--write": answer.write}
        unused = {**files, **limits, "--what": answer.what}
        _refuse(unused, "with --have, which asks what these GPUs serve")
        return _inventory(settings, goals, question, catalogue, target, answer, run, executor, fresh=fresh)
    if answer.max_load:
        flags = {"--candidate": answer.candidate, "--objective": target.objective, "--max-gpus": target.max_gpus}
        unused = {**catalogue.flags, **flags, "--write": answer.write, "--what": answer.what}
        _refuse(unused, "with --max-load, which asks about the scenario's own deployment")
        settings |= _set("workload.arrivals.rate", rate_of_text(question.rate))
        settings |= _set("plan.node_size", target.node_size)
        return _max_load(required("SCENARIO", scenario), settings, goals, question.trace, run, executor, fresh=fresh)
    return _plan(_question(scenario, settings, goals, question, catalogue, target), run, answer, executor, fresh=fresh)


def _question(
    scenario: Path | None,
    settings: Settings,
    goals: Goals,
    options: QuestionOptions,
    catalogue: CatalogueOptions,
    target: ObjectiveOptions,
) -> Question:
    from twin.api.planning import catalogue_question, scenario_question

    if scenario is None:
        return catalogue_question(_catalogue_question(goals, options, catalogue, target), settings)
    _refuse(catalogue.flags, "beside a scenario, whose section plan says it")
    settings |= _set("plan.goals", goals or None) | _set("workload.arrivals.rate", rate_of_text(options.rate))
    settings |= _set("plan.limits.gpus", target.max_gpus) | _set("plan.objective", target.objective)
    settings |= _set("plan.node_size", target.node_size)
    return scenario_question(scenario, settings, options.trace)


def _catalogue_question(
    goals: Goals, options: QuestionOptions, catalogue: CatalogueOptions, target: ObjectiveOptions
) -> CatalogueQuestion:
    model = required("--model", single("--model", catalogue.model, "with --have"))
    gpus, rate = required("--gpu", catalogue.gpu), rate_of_text(options.rate)
    if options.trace is None:
        required("--rate", rate)
    return _of_flags(model, gpus, rate, goals, options, catalogue, target)


def _of_flags(
    model: str,
    gpus: list[str],
    rate: float | None,
    goals: Goals,
    options: QuestionOptions,
    catalogue: CatalogueOptions,
    target: ObjectiveOptions,
) -> CatalogueQuestion:
    from twin.planning.catalogue import CatalogueQuestion

    return CatalogueQuestion(
        model=model,
        gpus=gpus,
        goals=required("--slo", goals or None),
        rate=rate,
        trace=options.trace,
        prompt_tokens=catalogue.prompt_tokens,
        answer_tokens=catalogue.answer_tokens,
        hit_rate=catalogue.hit_rate,
        degrees=whole_numbers("--tensor-parallel", catalogue.tensor_parallel or "1,2,4,8"),
        stages=whole_numbers("--pipeline-parallel", catalogue.pipeline_parallel or "1"),
        replicas=whole_numbers("--data-parallel", catalogue.data_parallel or "1"),
        layouts=(catalogue.layout or "colocated,disaggregated").split(","),
        weights=catalogue.weights.split(",") if catalogue.weights else (None,),
        cache=catalogue.cache or "bf16",
        chunks=whole_numbers("--chunk", catalogue.chunk or "512,1024,2048,4096,8192"),
        prices=by_name("--price", catalogue.price or [], "a price, or GPU=PRICE", gpus),
        max_gpus=target.max_gpus,
        node_size=target.node_size,
        objective=target.objective,
    )


def _plan(question: Question, run: RunOptions, answer: AnswerOptions, executor: ExecutorChoice, *, fresh: bool) -> int:
    from twin.api.planning import deployments_of_file, planning_run, save
    from twin.cli.console import progress
    from twin.planning.planner import Planner
    from twin.planning.what_if import with_changes

    variants = [(text, with_changes(question, text)) for text in answer.what or []]
    candidates = [deployment for path in answer.candidate or [] for deployment in deployments_of_file(path, question)]
    with planning_run(question, candidates, run.runs, executor, fresh=fresh) as (folder, simulations):
        _note_resumed(folder.path, len(simulations.store))
        planner = Planner(question, simulations, lambda trial: _note_better(trial, planner), answer.brief, candidates)
        windows_left = None if question.spec.aim == "throughput" or variants else planner.windows_left
        with progress("evaluating", None, 0, remaining=windows_left) as advance:
            simulations.advance = lambda key: advance("")
            result = planner.run().beside(
                (text, Planner(variant, simulations, brief=True, given=candidates).run()) for text, variant in variants
            )
        if answer.write is not None:
            _write(planner, answer.write)
        document = save(folder, result, figures=not run.no_figures)
    return _print(document, as_json=run.json)


def _inventory(
    settings: Settings,
    goals: Goals,
    options: QuestionOptions,
    catalogue: CatalogueOptions,
    target: ObjectiveOptions,
    answer: AnswerOptions,
    run: RunOptions,
    executor: ExecutorChoice,
    *,
    fresh: bool,
) -> int:
    from twin.api.planning import inventory_questions, planning_run, save
    from twin.cli.console import progress
    from twin.planning.inventory import Option, demands_of, divide

    have = counts_by_name("--have", catalogue.have or [], "GPU=NUMBER, as h100=2")
    demands = demands_of(required("--model", catalogue.model), options.rate or [])
    template = _of_flags(demands[0].model, list(have), 1.0, goals, options, catalogue, target)
    have, entries = inventory_questions(template, have, demands, settings)
    wanted = {"have": have, "demands": [[demand.model, demand.rate] for demand in demands]}
    opened = planning_run(entries[0].question, [], run.runs, executor, fresh=fresh, kind="inventory", inputs=wanted)
    with opened as (folder, simulations):
        _note_resumed(folder.path, len(simulations.store))
        with progress("evaluating", None, 0) as advance:
            simulations.advance = lambda key: advance("")
            parts = [Option(entry, simulations) for entry in entries]
            result = divide(have, demands, parts, brief=answer.brief)
        document = save(folder, result, figures=not run.no_figures)
    return _print(document, as_json=run.json)


def _max_load(
    scenario: Path,
    settings: Settings,
    goals: Goals,
    trace: Path | None,
    run: RunOptions,
    executor: ExecutorChoice,
    *,
    fresh: bool,
) -> int:
    from twin.api.planning import deployment_question, planning_run, save
    from twin.cli.console import progress
    from twin.planning.planner import find_max_load

    question, deployment = deployment_question(scenario, settings, goals, trace)
    opened = planning_run(question, [deployment], run.runs, executor, fresh=fresh, kind="max-load")
    with opened as (folder, simulations):
        _note_resumed(folder.path, len(simulations.store))
        with progress("evaluating", None, 0) as advance:
            simulations.advance = lambda key: advance("")
            result = find_max_load(question, deployment, simulations)
        document = save(folder, result)
    return _print(document, as_json=run.json)


def _day(
    scenario: Path,
    settings: Settings,
    goals: Goals,
    trace: Path | None,
    options: DayOptions,
    run: RunOptions,
    executor: ExecutorChoice,
    *,
    fresh: bool,
) -> int:
    from scenarios.overrides import apply
    from scenarios.reading import read_scenario
    from twin.api.arguments import require_at_least
    from twin.api.run_folder import complete
    from twin.cli.console import progress
    from twin.cli.runs import open_folder
    from twin.planning.day import plan_day, run_day
    from twin.planning.day_question import prepare_day
    from twin.serving.results.report import run_inputs

    days = 3 if options.days is None else options.days
    require_at_least("--days", days, 1)
    outages = None if options.mttf is None else seconds_of_text("--mttf", options.mttf)
    back = None if options.mttr is None else seconds_of_text("--mttr", options.mttr)
    spot = None if options.spot is None else spot_of_text(options.spot)
    share = 0.95 if options.minutes is None else options.minutes
    document = apply(read_scenario(scenario, "serving"), settings)
    rentals = outages, back, spot
    power = options.energy_price, options.max_kw
    question = prepare_day(document, scenario, str(options.day), goals, *rentals, share, days, trace, *power)
    inputs = question.stated | run_inputs([question.base], days, None)
    opened = open_folder("plan", run.runs, inputs, question.fingerprint, fresh=fresh)
    with executor.start() as started, opened as folder:
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


def _print(document: dict[str, Any], *, as_json: bool) -> int:
    from twin.cli.console import print_run

    print_run(document, as_json=as_json)
    return 0 if document["feasible"] else INFEASIBLE


def _set(field: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {field: value}


def _refuse(flags: dict[str, Any], why: str) -> None:
    for flag, value in flags.items():
        if value is not None:
            from workloads.errors import BadInput

            raise BadInput(f"expected none {why}", field=flag, value=value)


def _note_resumed(folder: Path, count: int) -> None:
    from twin.cli.console import note

    if count:
        note(f"taking up {folder}: {count} windows are done")


def _note_better(trial: Trial, planner: Planner) -> None:
    """Note a better deployment on stderr, as soon as it is found."""
    from twin.cli.console import note

    candidate = trial.candidate
    settings = "".join(f", {key} {value}" for key, value in candidate.family.settings)
    final = trial.draws or not planner.search.evaluator.can_draw(candidate)
    estimated = "" if final else " by the best estimate of the step times"
    note(f"candidate that meets the goals{estimated}: {candidate.devices} ({candidate.family.parallelism}{settings})")


def _write(planner: Planner, folder: Path) -> None:
    from twin.cli.console import note
    from twin.planning.launch import write_deployment

    if planner.best is not None:
        write_deployment(planner, folder)
        note(f"deployment: {folder}")
