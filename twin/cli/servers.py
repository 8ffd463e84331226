"""Commands around a running server: `twin adopt` (`init` without one) makes a scenario of it, `observe` records its
requests, `replay` sends it a workload, and `watch` tells when it drifts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.cli.console import (
    FileOrStdout,
    Flag,
    Json,
    Output,
    Settings,
    note,
    print_json,
    print_result,
    print_table,
    progress,
    write_or_print,
)
from twin.cli.plan_options import Texts
from twin.process import configure_libraries
from workloads.errors import BadInput

if TYPE_CHECKING:
    from twin.recording.run_writer import RunWriter
    from twin.refinement.watch import Watch


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


def observe(
    *,
    upstream: str | None = None,
    spans: Path | None = None,
    metrics: str | None = None,
    vllm_log: Path | None = None,
    every: float = 10.0,
    duration: float | None = None,
    output: Output,
    host: str = "127.0.0.1",
    port: int = 8001,
    keep_text: Flag = False,
    untouched: Flag = False,
) -> int:
    """Record a live server: its requests through a proxy, or pages of its metrics.

    Point clients at the proxy in place of the server. Responses pass as they come. Streamed completions and chats are
    written to requests.jsonl as they end, with the time of arrival, lengths, first and last token, for twin calibrate
    refine, twin replay and simulations. Ctrl-C ends it.

    Args:
        upstream: URL of the server, such as http://127.0.0.1:8000.
        spans: In place of a proxy: file of vLLM's OpenTelemetry spans, in OTLP-JSON, whose requests are written.
        metrics: In place of a proxy: URL of a server whose /metrics (vLLM's, for Prometheus) is read again and again.
            Means alone can be learned from it.
        vllm_log: In place of a proxy: step log of a vLLM that runs a scheduler class of live.vllm, for twin calibrate
            steps.
        every: With --metrics: seconds from one page to the next.
        duration: With --metrics: seconds until the last page. Default: until Ctrl-C.
        output: Folder for requests.jsonl and meta.json, or for pages of metrics, which must be empty.
        host: Address to listen on. Others than loopback let other machines use the server through the proxy.
        port: Port to listen on; 0: a free one.
        keep_text: Store the bodies of requests in bodies.jsonl. Otherwise no text is stored.
        untouched: Do not request counts of tokens of the server. Requests whose clients do not either are skipped.
    """

    if [upstream, spans, metrics, vllm_log].count(None) != 3:
        expected = "expected either this, or --spans or --vllm-log with a file, or --metrics with a URL"
        raise BadInput(expected, field="--upstream", value=upstream)
    if vllm_log is not None:
        from twin.recording.run_writer import record_step_log, seen

        for line in seen(record_step_log(vllm_log, output)):
            note(line)
        return 0
    if metrics is not None:
        return _scrape(metrics, output, every, duration)
    if spans is not None:
        from twin.recording.run_writer import record_spans

        _note_written(record_spans(spans, output), output)
        return 0
    assert upstream is not None
    from twin.api.inputs import require_port
    from twin.recording.run_writer import RunWriter
    from twin.recording.server_pages import Upstream, key_headers, published_settings
    from twin.recording.traffic import Proxy

    require_port(port)
    server = Upstream.of(upstream, "--upstream")
    settings = published_settings(server, key_headers())
    meta = {"source": "twin observe", "upstream": upstream, "cache_config": settings}
    writer = RunWriter(output, meta)
    bodies = output / "bodies.jsonl" if keep_text else None
    try:
        proxy = Proxy((host, port), server, writer, untouched=untouched, bodies=bodies)
    except OSError as error:
        raise BadInput(f"expected an address that is free: {error.strerror}", field="--port", value=port) from None
    note(f"listening on http://{host}:{proxy.server_address[1]}, in front of {upstream}; Ctrl-C ends it")
    try:
        proxy.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        proxy.server_close()
        writer.close()
    _note_written(writer, output)
    return 0


def _scrape(url: str, output: Path, every: float, duration: float | None) -> int:
    from twin.recording.server_pages import Upstream, key_headers, record_scrapes

    for flag, value in (("--every", every), ("--duration", duration)):
        if value is not None and not 0 < value < float("inf"):
            raise BadInput("expected seconds above 0", field=flag, value=value)
    url = url.removesuffix("/metrics")
    server = Upstream.of(url, "--metrics")
    until = "; Ctrl-C ends it" if duration is None else f" for {duration:g} s"
    note(f"reading {url}/metrics every {every:g} s{until}")
    try:
        pages = record_scrapes(server, output, key_headers(), every=every, duration=duration)
    except OSError as error:
        note(f"the server stopped answering ({error}); pages before are in {output}")
        return 1
    note(f"{pages} pages in {output}")
    return 0


def _note_written(writer: RunWriter, output: Path) -> None:
    note(f"{writer.written} requests in {output / 'requests.jsonl'}"
         + (f"; {writer.skipped} without times, see skipped.jsonl" if writer.skipped else ""))  # fmt: skip


FAILED, MISSED = 1, 3


def replay(
    trace: Path,
    /,
    *,
    url: str,
    output: Output,
    model: str | None = None,
    requests: int | None = None,
    speed: float = 1.0,
    vocabulary: int = 1000,
    slo: Texts = None,
) -> int:
    """Send a recorded workload to a live server at the recorded times, and write when its tokens came.

    Prompts are made up, of the recorded lengths and with the recorded common prefixes; answers have the recorded
    lengths (ignore_eos). The output is what twin observe writes, for twin calibrate refine. With goals, prints a
    verdict on each; exit code 3 if one is missed.

    Args:
        trace: Any trace with arrival times, a run's folder, its requests.jsonl, or a scenario (YAML), whose workload is
            drawn.
        url: URL of the server, such as http://127.0.0.1:8000. A key in OPENAI_API_KEY is sent.
        output: Folder for requests.jsonl and meta.json, which must be empty.
        model: Name of the model; default: the one that the server offers.
        requests: Send the first ones only.
        speed: 2 sends them twice as fast.
        vocabulary: Prompts have token ids below this number.
        slo: Goal of ttft, tpot, e2e or a throughput, may be given several times: --slo ttft_p99=1s --slo tpot_p99=40ms
    """
    from scenarios.fields import read_goals
    from scenarios.reading import goals_of_texts
    from twin.api.inputs import require_at_least
    from twin.api.live_server import check_replayable, scenario_trace, verdicts
    from twin.recording.run_writer import RunWriter
    from twin.recording.server_pages import Upstream, key_headers, model_cards, published_settings
    from twin.recording.traffic import FIRST_ID, Target, play
    from twin.refinement.question import REQUESTS, read_measured_run
    from workloads.traces import read_trace

    require_at_least("--requests", requests, 1)
    if not 0 < speed < float("inf"):
        raise BadInput("expected a number above 0", field="--speed", value=speed)
    if vocabulary <= FIRST_ID:
        raise BadInput(f"expected more than {FIRST_ID}", field="--vocabulary", value=vocabulary)
    goals = read_goals(goals_of_texts(slo or []))
    check_replayable(goals)
    measured = trace.is_dir() or trace.name == REQUESTS
    if trace.suffix in (".yaml", ".yml"):
        recorded = scenario_trace(trace)
    else:
        recorded = read_measured_run(trace).trace if measured else read_trace(trace)
    if recorded.arrivals is None:
        raise BadInput("expected a trace with arrival times", file=trace)
    count = min(requests or len(recorded), len(recorded))
    server = Upstream.of(url, "--url")
    headers = key_headers()
    offered = [card["id"] for card in model_cards(server, headers, "--url")]
    if model is None and len(offered) != 1:
        raise BadInput(f"expected one of {', '.join(offered) or 'none: the server offers none'}", field="--model")
    target = Target(server, model or offered[0], headers, vocabulary)
    settings = published_settings(server, headers)
    meta = {"source": "twin replay", "upstream": url, "model": target.model, "trace": str(trace), "speed": speed}
    writer = RunWriter(output, {**meta, "cache_config": settings})
    try:
        with progress("replaying", count, 0) as advance:
            late = play(recorded, target, writer, speed=speed, requests=count, advance=advance)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{writer.written} answers are kept in {output}") from None
    finally:
        writer.close()
    if late > 0.05:
        note(f"requests were sent up to {late:.2f} s late: this machine could not keep up")
    note(f"{writer.written} answers in {output / REQUESTS}"
         + (f"; {writer.skipped} failed, see skipped.jsonl" if writer.skipped else ""))  # fmt: skip
    if writer.skipped or not goals:
        return FAILED if writer.skipped else 0
    report, met = verdicts(goals, read_measured_run(output))
    print_table(report)
    return 0 if met else MISSED


STOPPED, ALARM, TOO_EARLY = 1, 4, 5


def watch(
    scenario: Path,
    /,
    *,
    pages: Path,
    metrics: str | None = None,
    every: float = 60.0,
    duration: float | None = None,
    once: Flag = False,
    since: float = 0.0,
    window: float = 60.0,
    drift: float = 0.05,
    learn: float = 600.0,
    refined: Path | None = None,
    factors: str | None = None,
    set_: Settings = None,
    json: Json = False,
) -> int:
    """Compare a running engine with its prediction, and raise an alarm when it drifts.

    Inter-token latencies of metrics pages (vLLM's or SGLang's, for Prometheus) are compared with those of simulated
    minutes of the same load. The exit code is 0 as predicted, 4 after a drift, 5 where the pages are too few, and 1 if
    the server does not answer.

    Args:
        scenario: Scenario file (YAML) of kind serving that describes the engine, best with refined step times.
        pages: Folder of metrics pages, as twin observe --metrics writes them. Those that are there are judged; with
            --metrics new ones are added.
        metrics: URL of the server whose /metrics is read until it drifts. Default: the folder alone.
        every: With --metrics: seconds from one page to the next.
        duration: With --metrics: seconds until the last page. Default: until a drift or Ctrl-C.
        once: With --metrics: read one page, judge all of the folder and end, for cron.
        since: Seconds since 1970 before which pages are left out, such as those of another version.
        window: Seconds that are judged at a time.
        drift: Change of latency to be found, as a share.
        learn: Seconds at the beginning that tell by how much the engine differs from the scenario; 0: trust the
            scenario.
        refined: After a drift: file to write, with step times corrected by the pages since then.
        factors: With --refined: name of what to learn. Default: everything, tied to each other.
        set_: Change any field of the scenario, key=value.
    """
    configure_libraries()
    from reports.calibration import watch_report
    from scenarios.reading import read_scenario, single_settings
    from twin.api.inputs import require_above_0
    from twin.api.live_server import follow, judge_folder
    from twin.recording.server_pages import Upstream
    from twin.refinement.question import Question, factor_names
    from twin.refinement.watch import DRIFTED, PREDICTED, Watch, WatchOptions

    for flag, value in (("--every", every), ("--duration", duration), ("--window", window), ("--drift", drift)):
        require_above_0(flag, value)
    if not 0 <= learn < float("inf"):
        raise BadInput("expected seconds of 0 or more", field="--learn", value=learn)
    if metrics is None and (once or duration is not None):
        raise BadInput("expected a URL, of which --once and --duration say how often it is read", field="--metrics")
    if refined is not None and refined.is_dir():
        raise BadInput("expected a file, found a folder", field="--refined", value=str(refined))
    server = None if metrics is None else Upstream.of(metrics.removesuffix("/metrics"), "--metrics")
    settings = single_settings(set_ or [])
    question = Question(scenario, read_scenario(scenario, "serving"), settings, pages, factors=factor_names(factors))
    with progress("watching", None, 0, patience=2.0) as advance:
        engine = Watch(question, WatchOptions(window, drift, learn), advance)
        try:
            if server is None:
                document = judge_folder(engine, pages, since)
            else:
                document = follow(engine, server, pages, since, every, 0.0 if once else duration, note)
        except OSError as error:
            note(f"the server does not answer /metrics: {error}")
            return STOPPED
        if refined is not None and document["verdict"] == DRIFTED:
            document |= _refine(engine, document, scenario, refined)
    print_result(document, watch_report, as_json=json)
    return {PREDICTED: 0, DRIFTED: ALARM}.get(document["verdict"], TOO_EARLY)


def _refine(engine: Watch, document: dict[str, Any], scenario: Path, refined: Path) -> dict[str, str]:
    """Write step times corrected since the drift. Pages that do not allow it cost a note, not the alarm."""
    from latency_models.io.config_io import write_yaml

    try:
        content = engine.refine(document).content(scenario, refined)
    except BadInput as error:
        note(f"step times are not refined: {error}")
        return {}
    write_or_print(write_yaml(content), refined)
    return {"refined": str(refined)}
