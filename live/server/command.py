"""The command line of the server, for `python -m live.server` and for `twin serve-live`.

Heavy modules are imported only when the command runs.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from live.server.options import EngineOptions, ModelOptions, ServerOptions, TopologyOptions, flag

if TYPE_CHECKING:
    from live.engine import Engine
    from live.loaded_model import ModelSource
    from live.server.config import ServerConfig, ServiceClass
    from live.server.loading import Cache

KEY = "SERVING_TWIN_API_KEY"
"""Environment variable that holds the API key."""

MAX_SETTING = 1e9
"""Maximum of sizes and times that are given as floats."""


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
    from workloads.errors import missing_extra

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported, which reads it then
    try:
        from live.device import DEFAULT_DTYPE, use_threads
        from live.loaded_model import ModelSource
        from live.server.engine_backend import EngineBackend
        from live.server.launcher import run
        from live.server.loading import build_text
        from live.server.topology import is_topology, refuse, serve_scenario
    except ImportError as error:
        raise missing_extra("live", error) from None
    use_threads(model.threads, "--threads")
    config = _server_config(model.name, server)
    dtype = model.dtype or DEFAULT_DTYPE[model.device]
    wanted = ModelSource(model.model, model.random_weights, dtype, model.device, model.threads)
    text = build_text(model.tokenizer, model.model, model.random_weights)
    config = replace(config, classes=_service_classes(engine))
    if engine.scenario is not None and is_topology(engine.scenario, engine.set_ or []):
        serve = partial(run, config=config, tokenizer=text[0], template=text[1], ends_on_failure=True)
        return serve_scenario(wanted, engine, topology, serve)
    refuse(topology)
    if engine.lora_modules and engine.scenario is None:
        from live.server.loading import build_lora_engine

        built = build_lora_engine(wanted, *_cache_and_sizes(engine), model.name, engine)
        return run(EngineBackend(*built), config, *text)
    return run(EngineBackend(_build_engine(wanted, engine)), config, *text)


def _server_config(name: str, options: ServerOptions) -> ServerConfig:
    """The server's settings; `name`: the model's name for clients.

    Raises:
        BadInput: a limit that is too small or too large.
    """
    from live.server.config import Limits, ServerConfig
    from workloads.errors import BadInput

    _at_least_one("max_concurrency", options.max_concurrency)
    _at_least_one("max_queue", options.max_queue)
    for field in ("max_body_mib", "drain_seconds", "header_seconds", "body_seconds", "write_seconds"):
        if not 0 < (value := getattr(options, field)) <= MAX_SETTING:
            raise BadInput(f"expected a number above 0, of at most {MAX_SETTING:g}", field=flag(field), value=value)
    limits = Limits(
        body_bytes=int(options.max_body_mib * 2**20),
        requests=options.max_concurrency,
        queue=options.max_queue,
        header_seconds=options.header_seconds,
        body_seconds=options.body_seconds,
        write_seconds=options.write_seconds,
    )
    key = os.environ.get(KEY, "") if options.api_key is None else options.api_key
    return ServerConfig(name, options.host, options.port, key, limits, options.drain_seconds)


def _service_classes(options: EngineOptions) -> dict[str, ServiceClass]:
    """The service classes of a serving scenario; none without one.

    Raises:
        BadInput: the scenario cannot be used.
    """
    from live.server.config import ServiceClass
    from scenarios.overrides import single_settings
    from scenarios.reading import read_scenario
    from scenarios.serving import check_scenario

    if options.scenario is None:
        return {}
    document = read_scenario(options.scenario, "serving", "afd-bundle")
    if document["kind"] != "serving":
        return {}
    scenario = check_scenario(document, single_settings(options.set_ or []), options.scenario)
    return {
        name: ServiceClass(spec.priority, math.inf if spec.ttft is None else spec.ttft)
        for name, spec in scenario.workload.service_classes.items()
    }


def _build_engine(wanted: ModelSource, options: EngineOptions) -> Engine:
    """The engine that a scenario describes, or without one the flags.

    Raises:
        BadInput: flags of the engine beside a scenario, changes without one, or what the engine cannot be built from.
    """
    from live.server.loading import build_engine, build_planned_engine
    from workloads.errors import BadInput

    changes = options.set_ or []
    if options.scenario is None:
        if changes:
            raise BadInput("expected it beside --scenario, whose fields it changes", field="--set", value=changes[0])
        if options.max_loras is not None:
            raise BadInput("expected it beside --lora-modules", field="--max-loras", value=options.max_loras)
        cache, sequences, tokens = _cache_and_sizes(options)
        one_shot, drafts = options.one_shot is not False, options.speculative_config
        return build_engine(wanted, cache, sequences, tokens, one_shot, drafts)
    from scenarios.live_engines import single_engine
    from scenarios.overrides import single_settings
    from scenarios.reading import read_scenario

    for name, value in options.settings.items():
        expected = "expected none beside --scenario, which has the engine's settings: change them by --set engine.…"
        raise BadInput(expected, field=flag(name), value=value)
    document = read_scenario(options.scenario, "serving")
    return build_planned_engine(wanted, single_engine(document, single_settings(changes), options.scenario))


def _cache_and_sizes(options: EngineOptions) -> tuple[Cache, int, int]:
    """The KV cache, running sequences and tokens of a step, from the flags."""
    from live.server.loading import Cache

    sequences = 128 if options.max_num_seqs is None else options.max_num_seqs
    tokens = 2048 if options.max_num_batched_tokens is None else options.max_num_batched_tokens
    _at_least_one("max_num_seqs", sequences)
    return Cache(options.num_gpu_blocks, options.kv_cache_memory_bytes), sequences, tokens


def _at_least_one(name: str, value: int) -> None:
    from workloads.errors import BadInput

    if value < 1:
        raise BadInput("expected a whole number from 1 up", field=flag(name), value=value)
