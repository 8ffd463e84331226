"""`twin plan`: from a workload and goals to a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory
    from twin.executors.executor import ExecutorChoice
    from twin.planning.judging import Judge, Verdict
    from twin.planning.planner import Planner
    from twin.planning.question import Question
    from twin.planning.space import Candidate

FLAG = Parameter(negative=())

Given = TypeVar("Given")

INFEASIBLE = 3
"""Exit code: no candidate meets the goals."""


def plan(
    scenario: Path | None = None,
    /,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    slo: Annotated[list[str] | None, Parameter(negative=())] = None,
    rate: float | None = None,
    trace: Path | None = None,
    model: str | None = None,
    gpu: Annotated[list[str] | None, Parameter(negative=())] = None,
    price: Annotated[list[str] | None, Parameter(negative=())] = None,
    prompt_tokens: float | None = None,
    answer_tokens: float | None = None,
    tensor_parallel: str | None = None,
    pipeline_parallel: str | None = None,
    layout: str | None = None,
    weights: str | None = None,
    cache: str | None = None,
    chunk: str | None = None,
    max_gpus: int | None = None,
    confidence: float | None = None,
    objective: str | None = None,
    json: Annotated[bool, FLAG] = False,
    runs: Path = Path("runs"),
    jobs: int | None = None,
    executor: str = "local",
    fresh: Annotated[bool, FLAG] = False,
    brief: Annotated[bool, FLAG] = False,
    max_load: Annotated[bool, FLAG] = False,
    candidate: Annotated[list[Path] | None, Parameter(negative=())] = None,
    write: Path | None = None,
    no_figures: Annotated[bool, FLAG] = False,
) -> int:
    """Find the deployment that meets goals at the least cost: how many GPUs, which parallelism, together or apart.

    Candidates are pruned by bounds and estimates, and decided by simulation, all with the same requests. The answer
    says with which confidence it meets the goals, how much more load it bears, and what would change it. Leaves a run
    folder with manifest, windows, summary, figures and an HTML report. The same command resumes a killed plan. Exit
    code 3 if no candidate meets the goals; the nearest miss is shown then.

    Parameters
    ----------
    scenario
        Scenario file (YAML) of kind serving with a section plan, for example examples/plan-tiny.yaml. Without one,
        --model, --gpu, --rate, --slo and --trace make the question, and step times are computed from data sheets.
    set_
        Change any field, key=value. Example: --set plan.limits.gpus=16
    slo
        Goal, in place of those in the file: --slo ttft_p99=1s --slo tpot_p99=40ms --slo classify.e2e_p95=200ms
    rate
        Requests per second.
    trace
        Trace whose lengths to use, and whose arrivals where the scenario replays.
    model
        Without a scenario: a built-in name, Hugging Face id, a model file or a config.json.
    gpu
        Without a scenario: a GPU of the hardware catalogue or the begin of its name (h200), or a file; several are
        tried one by one.
    price
        Price of a GPU per hour: --price 3.5, or h200=3.5 where there are several. Makes cost the objective.
    prompt_tokens
        Without a trace: mean tokens of prompts, log-normal.
    answer_tokens
        Without a trace: mean tokens of answers, log-normal.
    tensor_parallel
        Without a scenario: GPUs that share each layer, to try. Default: 1,2,4,8.
    pipeline_parallel
        Without a scenario: pipeline stages of an engine to try, each of so many GPUs. Default: 1.
    layout
        Without a scenario: colocated, disaggregated (prefill and decode apart), afd (prefill engines and AFD bundles
        that decode), with commas between. Default: colocated,disaggregated.
    weights
        Without a scenario: formats of weights to try (bf16, fp8, …). Default: as the model is published.
    cache
        Without a scenario: the format of the KV cache. Default: bf16.
    chunk
        Without a scenario: values of max_num_batched_tokens to try. Default: 512,1024,2048,4096,8192.
    max_gpus
        At most so many GPUs in all.
    confidence
        How sure the plan must be, given the error of the step times: a share of their draws, 0.5 to 1. Default: 0.9.
    objective
        gpus, cost_per_hour, cost_per_million_tokens, or throughput: the highest rate on --max-gpus.
    json
        Print one JSON document on stdout and nothing else there.
    runs
        Parent of the run folders.
    jobs
        Processes; default: one for each core.
    executor
        Where windows are simulated: local, dask (workers of its own), dask://host:port (a running scheduler) or ray.
    fresh
        Start anew even if an unfinished run of the same plan exists.
    brief
        Leave out headroom and what would change the answer.
    max_load
        The highest rate at which the scenario's own deployment (engine, step_time, system) meets the goals, with an
        interval, in place of a search.
    candidate
        Scenario file whose deployment (engine, step_time, system) competes with those of the plan; its row is in the
        table even if it fails. Also the folder that AIConfigurator's --save-dir names, or a best_config_topn.csv in it.
        May be given several times.
    write
        Folder for the recommended deployment: scenarios that twin simulate reproduces, and launch commands.
    no_figures
        Leave out figures and the HTML report.
    """
    from scenarios.overrides import goals_of_texts, single_settings
    from scenarios.reading import read_scenario
    from twin.api.arguments import require_at_least
    from twin.executors.executor import choose_executor
    from twin.planning.question import read_question

    require_at_least("--jobs", jobs, 1)
    chosen = choose_executor(executor, jobs)
    require_at_least("--max-gpus", max_gpus, 1)
    settings: dict[str, Any] = single_settings(set_ or [])
    goals = goals_of_texts(slo or [])
    settings |= {} if confidence is None else {"plan.confidence": confidence}
    without = {"--model": model, "--gpu": gpu, "--price": price, "--prompt-tokens": prompt_tokens,
               "--answer-tokens": answer_tokens, "--tensor-parallel": tensor_parallel,
               "--pipeline-parallel": pipeline_parallel, "--layout": layout, "--weights": weights, "--cache": cache,
               "--chunk": chunk}  # fmt: skip
    if max_load:
        settings |= {} if rate is None else {"workload.arrivals.rate": rate}
        alone = without | {"--candidate": candidate, "--objective": objective, "--max-gpus": max_gpus, "--write": write}
        _refuse(alone, "with --max-load, which asks about the scenario's own deployment")
        return _bear(_required("SCENARIO", scenario), settings, goals, trace, runs, chosen, as_json=json, fresh=fresh)
    if scenario is None:
        from twin.planning.catalogue import CatalogueQuestion, of_every_engine, scenario_of

        asked = CatalogueQuestion(
            _required("--model", model), _required("--gpu", gpu), _required("--slo", goals or None),
            _required("--rate", rate), trace, prompt_tokens, answer_tokens,
            _wholes("--tensor-parallel", tensor_parallel or "1,2,4,8"),
            _wholes("--pipeline-parallel", pipeline_parallel or "1"),
            (layout or "colocated,disaggregated").split(","), weights.split(",") if weights else (None,),
            cache or "bf16", _wholes("--chunk", chunk or "512,1024,2048,4096,8192"), _prices(price or [], gpu or []),
            max_gpus, objective,
        )  # fmt: skip
        document = scenario_of(asked)
        question = read_question(document, of_every_engine(settings, document), Path("plan"))
    else:
        _refuse(without, "beside a scenario, whose section plan says it")
        settings |= {"plan.goals": goals} if goals else {}
        settings |= {} if rate is None else {"workload.arrivals.rate": rate}
        settings |= {} if max_gpus is None else {"plan.limits.gpus": max_gpus}
        settings |= {} if objective is None else {"plan.objective": objective}
        question = read_question(read_scenario(scenario, "serving"), settings, scenario, trace)
    given = [each for path in candidate or [] for each in _given(path, question)]
    return _answer(
        question, given, runs, chosen, as_json=json, fresh=fresh, brief=brief, write=write, figures=not no_figures
    )


def _required(flag: str, value: Given | None) -> Given:
    """The value of a flag that a question without a scenario needs."""
    if value is None:
        from workloads.errors import BadInput

        raise BadInput("expected a scenario file, or --model, --gpu, --rate, --slo and --trace", field=flag)
    return value


def _refuse(given: dict[str, Any], why: str) -> None:
    """Refuse flags that the kind of question has no use for."""
    for flag, value in given.items():
        if value is not None:
            from workloads.errors import BadInput

            raise BadInput(f"expected none {why}", field=flag, value=value)


def _wholes(flag: str, text: str) -> list[int]:
    """Whole numbers with commas between."""
    from workloads.errors import BadInput

    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise BadInput("expected whole numbers with commas between", field=flag, value=text)
    return [int(part) for part in parts]


def _prices(texts: list[str], gpus: list[str]) -> dict[str, float]:
    """Prices by GPU; one without a name is that of all."""
    from workloads.errors import BadInput

    found: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            raise BadInput("expected a price, or GPU=PRICE", field="--price", value=text) from None
        found |= {name: value} if equals else dict.fromkeys(gpus, value)
    return found


def _given(path: Path, question: Question) -> list[Candidate]:
    """The deployment of a scenario file, or those of AIConfigurator's answer, as candidates."""
    from twin.planning.aiconfigurator_answer import candidates_of_answer, is_answer

    if is_answer(path):
        return candidates_of_answer(path, question)
    from scenarios.reading import read_scenario
    from twin.planning.given import given_candidate

    return [given_candidate(read_scenario(path, "serving"), path, question, path.stem)]


def _bear(
    scenario: Path,
    settings: dict[str, Any],
    goals: dict[str, float | str],
    trace: Path | None,
    runs: Path,
    chosen: ExecutorChoice,
    *,
    as_json: bool,
    fresh: bool,
) -> int:
    """The rate that a scenario's deployment bears."""
    from scenarios.overrides import apply
    from scenarios.reading import read_scenario
    from twin.cli.console import note, print_json, print_table, progress
    from twin.planning.given import given_candidate, plan_of_given
    from twin.planning.max_load import MaxLoad
    from twin.planning.question import read_question

    document = apply(read_scenario(scenario, "serving"), settings)
    question = read_question(plan_of_given(document, goals), {}, scenario, trace)
    deployment = given_candidate(document, scenario, question, scenario.stem)
    with chosen.start() as executor, _run_folder(question, [deployment], runs, fresh=fresh, of="max-load") as run:
        done = run.points()
        if done:
            note(f"taking up {run.path}: {len(done)} windows are done")
        with progress("evaluating", None, 0) as advance:
            asked = MaxLoad(question, deployment, done, run.add_point, executor, lambda key: advance(""))
            answer = asked.run()
        answer["run"] = {"id": run.id, "directory": str(run.path)}
        run.write_json("summary.json", answer)
        run.set_status(True, "complete")
    if as_json:
        print_json(answer)
    else:
        from reports.planning.table import load_table

        print_table(load_table(answer))
    note(f"run folder: {run.path}")
    return 0 if answer["feasible"] else INFEASIBLE


def _answer(
    question: Question,
    given: list[Candidate],
    runs: Path,
    chosen: ExecutorChoice,
    *,
    as_json: bool,
    fresh: bool,
    brief: bool,
    write: Path | None,
    figures: bool,
) -> int:
    from twin.api.drawing import illustrate
    from twin.cli.console import note, print_json, print_table, progress
    from twin.planning.planner import Planner

    with chosen.start() as executor, _run_folder(question, given, runs, fresh=fresh) as run:
        done = run.points()
        if done:
            note(f"taking up {run.path}: {len(done)} windows are done")
        planner: Planner

        def left() -> int:
            return planner.windows_left()

        bound = None if question.spec.aim == "throughput" else left
        with progress("evaluating", None, 0, left=bound) as advance:
            planner = Planner(
                question, done, run.add_point, executor, lambda key: advance(""),
                lambda verdict: _tell(verdict, planner.search.judge), brief, given,
            )  # fmt: skip
            document = planner.run()
        document["run"] = {"id": run.id, "directory": str(run.path)}
        if write is not None:
            _write(planner, write)
        run.write_json("summary.json", document)
        if figures:
            illustrate(document, run)
        run.set_status(True, "complete")
    if as_json:
        print_json(document)
    else:
        from reports.planning.table import plan_table

        print_table(plan_table(document))
    note(f"run folder: {run.path}")
    return 0 if document["feasible"] else INFEASIBLE


def _tell(verdict: Verdict, judge: Judge) -> None:
    """Note a better deployment on stderr, as soon as it is found."""
    from twin.cli.console import note

    candidate = verdict.candidate
    settings = "".join(f", {key} {value}" for key, value in candidate.family.settings)
    estimated = "" if verdict.draws or not judge.can_draw(candidate) else " by the best estimate of the step times"
    note(f"candidate that meets the goals{estimated}: {candidate.devices} ({candidate.family.parallelism}{settings})")


def _run_folder(
    question: Question, given: list[Candidate], runs: Path, *, fresh: bool, of: str = "plan"
) -> RunDirectory:
    from reports.records.run_directory import fingerprint, open_run
    from twin.api.manifest import manifest

    inputs = {
        "scenario_file": str(question.path),
        "scenario": question.document,
        "plan": question.spec.model_dump(mode="json"),
        "seed": question.seed,
        "trace": None if question.trace is None else question.trace.name,
        "given": [each.family.given.sections | {"name": each.name} for each in given if each.family.given],
    }
    content = manifest(inputs)
    identity = [content["version"], inputs, str(question.path.parent)]
    return open_run(runs, of, fingerprint(identity), content, resume=not fresh)


def _write(planner: Planner, folder: Path) -> None:
    from twin.cli.console import note
    from twin.planning.launch import write_deployment

    if planner.best is not None:
        write_deployment(planner, folder)
        note(f"deployment: {folder}")
