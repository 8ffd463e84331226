"""`twin page`: what if, in a browser on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twin.cli.console import Flag, Settings, note
from workloads.errors import BadInput

if TYPE_CHECKING:
    from twin.page.questions import Inquiry


def page(
    scenario: Path | None = None,
    /,
    *,
    set_: Settings = None,
    model: str = "llama-3.1-8b",
    gpu: str = "h100-sxm",
    requests: int = 2000,
    port: int = 5006,
    no_browser: Flag = False,
) -> int:
    """Ask what if in a browser: sliders for rate, lengths, goals, layout and engine, and answers that follow them.

    Latencies, who ran and waited, throughput against interactivity, and the AFD ratio curve are computed again while a
    slider moves. The address restores what was chosen, and the scenario can be saved. The page is served to this
    machine alone, until Ctrl-C.

    Args:
        scenario: Scenario file (YAML) of kind serving. Without one, that of twin init for --model and --gpu.
        set_: Change any field, key=value. Example: --set workload.arrivals.rate=8
        model: Without a scenario: built-in name, Hugging Face id, a model file or a config.json.
        gpu: Without a scenario: built-in name of a device or the begin of it (h200), or a hardware file.
        requests: The most requests that an answer simulates.
        port: Of this machine; 0 takes a free one.
        no_browser: Only print the address.
    """
    from scenarios.reading import apply, read_scenario, single_settings
    from twin.api.inputs import require_at_least, require_port
    from twin.page.questions import Inquiry

    require_at_least("--requests", requests, 1)
    require_port(port)
    if scenario is None:
        import yaml

        from twin.api.starting_scenario import starting_scenario

        path, document = Path("scenario.yaml"), yaml.safe_load(starting_scenario(model, gpu))
    else:
        path, document = scenario, read_scenario(scenario, "serving")
    inquiry = Inquiry(apply(document, single_settings(set_ or [])), path, requests)
    _ = inquiry.spec  # errors are told before a page is open
    return _serve(inquiry, port, no_browser)


def _serve(inquiry: Inquiry, port: int, no_browser: bool) -> int:
    import logging
    import webbrowser

    from twin.page.application import ADDRESS, make_server

    logging.getLogger("bokeh").setLevel(logging.ERROR)  # a line for each page that is opened
    try:
        server = make_server(inquiry, port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInput(f"expected a free port: {reason}", field="--port", value=port) from None
    address = f"http://{ADDRESS}:{server.port}/"
    server.start()
    note(f"what if: {address} (Ctrl-C ends it)")
    if not no_browser:
        server.io_loop.add_callback(webbrowser.open, address)
    try:
        server.io_loop.start()
    except KeyboardInterrupt:
        note("the page is closed")
    finally:
        server.stop()
    return 0
