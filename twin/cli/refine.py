"""`twin calibrate refine`: a scenario's step times, corrected by a short run of the real engine."""

from __future__ import annotations

from os.path import relpath
from pathlib import Path

from twin.cli.options import Json, Output, Settings
from twin.process import configure_libraries
from workloads.errors import BadInput


def refine(
    scenario: Path,
    /,
    *,
    run: Path,
    output: Output,
    first: int | None = None,
    factors: str | None = None,
    set_: Settings = None,
    json: Json = False,
) -> int:
    """Correct step times by a few minutes of the real engine, and predict the rest of its run.

    Learns what the step-time source does not know of itself: host time, kernels in an engine, attention, links. Says
    what the run cannot tell apart. The file is for step_time: {source: refined, path: FILE}; its draws are narrower.

    Args:
        scenario: Scenario file (YAML) of kind serving that describes the engine.
        run: Measured run: a folder with requests.jsonl and meta.json (vLLM's times of each request, or those that twin
            observe and twin replay write), the result of vllm bench serve --save-detailed, a CSV log of vLLM's steps,
            or a folder of metrics pages (twin observe --metrics), which tell one factor.
        output: File to write.
        first: Requests to learn from, in order of arrival; the rest are predicted. Default: a fifth (a tenth of logged
            steps).
        factors: Comma-separated names of what to learn. Default: all, with the deviation that the run leaves of each.
            Those that are named are refused if the run cannot tell them apart.
        set_: Change any field of the scenario, key=value.
    """
    configure_libraries()
    from latency_models.io.config_io import write_yaml
    from scenarios.overrides import single_settings
    from scenarios.reading import read_scenario
    from twin.api.arguments import require_at_least
    from twin.cli.console import note, print_json, print_table, progress, write_or_print
    from twin.refinement.question import Question
    from twin.refinement.refine import refine

    require_at_least("--first", first, 2)
    names = tuple(name.strip() for name in factors.split(",")) if factors else ()
    settings = single_settings(set_ or [])
    document = read_scenario(scenario, "serving")
    if output.is_dir():
        raise BadInput("expected a file, found a folder", field="--output", value=str(output))
    with progress("refining", None, 0, patience=2.0) as advance:
        result = refine(Question(scenario, document, settings, run, first, names), advance)
    for text in result.notes:
        note(text)
    folder = relpath(scenario.parent.absolute(), output.parent.absolute())
    content = {"schema": result.file["schema"], "folder": folder, **result.file}
    write_or_print(write_yaml(content), output)
    if json:
        print_json({**result.document, "output": str(output)})
    else:
        from reports.calibration import refinement_report

        print_table(refinement_report(result.document))
    note(f"next: twin simulate {scenario} --set 'step_time={{source: refined, path: {output}}}'"
         + "".join(f" --set {field}={value}" for field, value in result.document["settings"].items()))  # fmt: skip
    return 0
