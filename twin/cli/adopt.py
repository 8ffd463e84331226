"""`twin init` and `twin adopt`: a scenario to start from, of data sheets or of a running server."""

from __future__ import annotations

from pathlib import Path

from twin.cli.console import FileOrStdout, Json, Settings
from twin.process import configure_libraries
from workloads.errors import BadInput


def init(
    *,
    model: str = "llama-3.1-8b",
    gpu: str = "h100-sxm",
    weights: str | None = None,
    rate: float | None = None,
    output: FileOrStdout = None,
) -> int:
    """Write a serving scenario with comments, which runs as it is: one model on the fewest GPUs that hold it.

    Step times are computed from data sheets (source roofline), so that nothing needs to be measured. A file that is
    there already is not overwritten.

    Args:
        model: Built-in name, Hugging Face id, a model file or a config.json.
        gpu: Built-in name of a device or the begin of it (h200), or a hardware file.
        weights: Format of the weights: bf16, fp8, int8, fp4, or mxfp4 for experts alone. Default: as the model is
            published.
        rate: Requests a second. Default: about half of what one engine bears.
    """
    from twin.api.inputs import require_above_0
    from twin.api.starting_scenario import starting_scenario
    from twin.cli.console import note, write_or_print

    require_above_0("--rate", rate)
    text = starting_scenario(model, gpu, weights, rate)
    if output is not None and output.exists():
        raise BadInput("expected a file that is not there yet", field="--output", value=str(output))
    write_or_print(text, output)
    if output is not None:
        note(f"next: twin simulate {output}")
    return 0


def adopt(
    url: str,
    /,
    *,
    into: Path = Path("adopted"),
    replay: float | None = None,
    observe: float | None = None,
    requests: Path | None = None,
    rate: float | None = None,
    prompt_tokens: float | None = None,
    answer_tokens: float | None = None,
    gpu: str | None = None,
    model: str | None = None,
    model_config: str | None = None,
    vocabulary: int = 1000,
    set_: Settings = None,
    json: Json = False,
) -> int:
    """Measure a running vLLM or SGLang server, and write a scenario of it and the question of a plan.

    Reads the server's settings, sends it requests for five minutes, corrects step times by part of them, and prints
    predicted beside measured for the others. What the server does not publish is asked for, by the flag that says it.

    Args:
        url: URL of the server, such as http://127.0.0.1:8000. A key in OPENAI_API_KEY is sent.
        into: Folder for the files, which must be empty or not there.
        replay: Seconds for which requests are sent. Default: 300, unless the server has requests of its own.
        observe: In place of a replay: seconds for which metrics pages are read. Means alone are learned from.
        requests: Trace with arrival times to send. Default: log-normal lengths and Poisson arrivals.
        rate: Requests per second to send; default: two in flight on average.
        prompt_tokens: Mean tokens of prompts; default: those of the server until now, or 512.
        answer_tokens: Mean tokens of answers; default: those of the server until now, or 128.
        gpu: The server's GPU: a built-in name or the begin of it (h200), a hardware file, or cpu for no data sheet.
        model: Name of the served model, where there are several.
        model_config: The config.json of the model, or a built-in name, where the server's name for it is not known
            here.
        vocabulary: Prompts have token ids below this number.
        set_: Change any field of the scenario, key=value.
    """
    configure_libraries()
    from scenarios.reading import single_settings
    from twin.api.adoption import AdoptionOptions, next_commands
    from twin.api.adoption import adopt as adopt_server
    from twin.api.inputs import require_above_0, require_at_least
    from twin.cli.console import note, print_json, print_table, progress
    from twin.recording.traffic import FIRST_ID

    if observe is not None and (replay is not None or requests is not None or rate is not None):
        raise BadInput("expected none beside --replay, --requests and --rate", field="--observe", value=observe)
    for flag, value in (("--replay", replay), ("--observe", observe), ("--rate", rate),
                        ("--prompt-tokens", prompt_tokens), ("--answer-tokens", answer_tokens)):  # fmt: skip
        require_above_0(flag, value)
    require_at_least("--vocabulary", vocabulary, FIRST_ID + 1)
    options = AdoptionOptions(
        gpu, model, model_config, observe, replay, requests, rate, prompt_tokens, answer_tokens, vocabulary,
        single_settings(set_ or []),
    )  # fmt: skip
    with progress("measuring", None, 0, patience=10.0) as advance:
        adoption = adopt_server(url, into, options, note, advance)
    commands = next_commands(into, adoption)
    document = adoption.refinement.document
    if json:
        server = {name: getattr(adoption.server, name) for name in ("engine", "version", "weights", "max_model_len")}
        print_json({"schema": "twin.adoption/1", "server": server, "refinement": document, "next": commands})
    else:
        from reports.calibration import refinement_report

        print_table(refinement_report(document))
    for command in commands:
        note(f"next: {command}")
    return 0
