"""`twin watch`: a running engine beside its prediction, with an alarm when it drifts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.cli.options import Flag, Json, Settings
from twin.process import configure_libraries

if TYPE_CHECKING:
    from twin.refinement.watch import Watch

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
    from scenarios.overrides import single_settings
    from scenarios.reading import read_scenario
    from twin.api.arguments import require_above_0
    from twin.api.watching import follow, judge_folder
    from twin.cli.console import note, print_result, progress
    from twin.recording.upstream import Upstream
    from twin.refinement.question import Question, factor_names
    from twin.refinement.watch import DRIFTED, PREDICTED, Watch, WatchOptions
    from workloads.errors import BadInput

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
    from twin.cli.console import note, write_or_print
    from workloads.errors import BadInput

    try:
        content = engine.refine(document).content(scenario, refined)
    except BadInput as error:
        note(f"step times are not refined: {error}")
        return {}
    write_or_print(write_yaml(content), refined)
    return {"refined": str(refined)}
