"""`python -m live.server` and `twin serve-live`: the command line of the server.

Heavy modules are imported only when the command runs.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from functools import partial

import cyclopts

from live.server.options import (
    EngineOptions,
    ModelOptions,
    ServerConfig,
    ServerOptions,
    TopologyOptions,
    command_line,
)
from workloads.errors import TwinError, missing_extra


def serve_live(
    *,
    model: ModelOptions,
    engine: EngineOptions = EngineOptions(),  # noqa: B008 (frozen)
    topology: TopologyOptions = TopologyOptions(),  # noqa: B008 (frozen)
    server: ServerOptions = ServerOptions(),  # noqa: B008 (frozen)
) -> int:
    """Serve a model over HTTP, with OpenAI's endpoints.

    Prints one line when it accepts requests. On SIGTERM or Ctrl-C, running requests finish, new ones are refused, and
    the exit code is 0. A second signal ends the server at once, with code 1 if requests were cut off.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported, which reads it then
    try:
        from live.device import DEFAULT_DTYPE, use_threads
        from live.loaded_model import ModelSource
        from live.server.launcher import run, serve_topology
        from live.server.loading import (
            ServedScenario,
            build_text,
            engine_of_flags,
            engine_of_scenario,
            plan_topology,
            refuse,
        )
        from live.topologies.transport import TransportError
    except ImportError as error:
        raise missing_extra("live", error) from None
    use_threads(model.threads, "--threads")
    dtype = model.dtype or DEFAULT_DTYPE[model.device]
    source = ModelSource(
        model.model, model.random_weights, dtype, model.device, model.threads, attention_backend=model.attention_backend
    )
    text = build_text(model.tokenizer, model.model, model.random_weights)
    scenario = ServedScenario.read(engine)
    classes = scenario.service_classes if scenario is not None else {}
    config = ServerConfig(model.name, server.checked(), classes)
    if scenario is not None and scenario.is_topology:
        deployment = plan_topology(scenario, source, engine, topology)
        serve = partial(run, config=config, tokenizer=text[0], template=text[1], ends_on_failure=True)
        return serve_topology(deployment, command_line(model, engine, topology), topology, serve)
    refuse(topology)
    try:
        if scenario is None:
            backend = engine_of_flags(source, engine, model.name)
        else:
            backend = engine_of_scenario(source, engine, scenario)
    except TransportError as error:
        print(f"serve-live: {error}", file=sys.stderr, flush=True)
        return 1
    with closing(backend):
        return run(backend, config, *text, ends_on_failure=backend.ranks is not None)


def main() -> int:
    """Run the server. Exit codes: 0 all requests were answered, 1 some were cut off, 2 bad input (one line on
    stderr).
    """
    app = cyclopts.App(name="python -m live.server", help_format="plaintext", version_flags=[])
    app.default(serve_live)
    try:
        result = app(exit_on_error=False, print_error=False, result_action="return_value")
    except (cyclopts.CycloptsError, TwinError) as error:
        print(f"live.server: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
