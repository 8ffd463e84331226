"""`twin replay`: recorded requests, sent to a live server."""

from __future__ import annotations

from pathlib import Path

from twin.cli.options import Output
from twin.cli.plan_options import Texts
from workloads.errors import BadInput

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
    from scenarios.goals import read_goals
    from scenarios.overrides import goals_of_texts
    from twin.api.arguments import require_at_least
    from twin.api.replay_goals import check_replayable, scenario_trace, verdicts
    from twin.cli.console import note, print_table, progress
    from twin.recording.player import FIRST_ID, Target, play
    from twin.recording.run_writer import RunWriter
    from twin.recording.upstream import Upstream, key_headers, model_cards, published_settings
    from twin.refinement.measured_run import REQUESTS, read_measured_run
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
