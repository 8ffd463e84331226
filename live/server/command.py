"""The command line of the server, for `python -m live.server` and for `twin serve-live`.

Heavy modules are imported only when the command runs.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from live.engine import Engine
    from live.loaded_model import ModelSource
    from live.server.flags import EngineFlags

KEY = "SERVING_TWIN_API_KEY"
"""Environment variable that holds the API key."""

MAX_SETTING = 1e9
"""Maximum of sizes and times that are given as floats."""


def serve_live(
    *,
    model: Path,
    random_weights: Annotated[bool, Parameter(negative=())] = False,
    tokenizer: Path | None = None,
    served_model_name: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int = 1,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    scenario: Path | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    module: Annotated[list[str] | None, Parameter(negative=())] = None,
    role: str | None = None,
    rank: int = 0,
    rendezvous: str | None = None,
    join_seconds: float = 10.0,
    worker_seconds: float = 6.0,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    kv_blocks: int | None = None,
    kv_gib: float | None = None,
    one_shot: bool | None = None,
    max_body_mib: float = 4.0,
    max_concurrency: int = 1024,
    max_queue: int = 2048,
    drain_seconds: float = 30.0,
    header_seconds: float = 10.0,
    body_seconds: float = 60.0,
    write_seconds: float = 10.0,
) -> int:
    """Serve a model over HTTP, with OpenAI's endpoints.

    Prints one line when it accepts requests. On SIGTERM or Ctrl-C, running requests finish, new ones are refused, and
    the exit code is 0. A second signal ends the server at once, with code 1 if requests were cut off.

    Parameters
    ----------
    model
        A Hugging Face directory; with random weights a config.json.
    random_weights
        Random weights of the right shapes. Without a tokenizer, requests and responses hold token ids.
    tokenizer
        Folder of a tokenizer.json; default: the model's.
    served_model_name
        The model's name for clients; default: its folder's name.
    dtype
        Type of weights and KV cache; default: float32 on a CPU, bfloat16 on a GPU.
    device
        Device of the model.
    threads
        CPU threads for one operation.
    host
        Address to listen on.
    port
        Port to listen on; 0 takes a free one.
    api_key
        Key that clients must send, except to /health, /ping, /version and /metrics; default: $SERVING_TWIN_API_KEY.
    scenario
        Serving scenario whose engine section describes the engine: the one that twin simulate predicts. It replaces the
        flags for sequences, tokens, the cache and one-shot requests, which are refused beside it. A scenario of kind
        afd-bundle with one ratio serves with attention and FFN workers, each a process; one with prefill and decode
        pools serves with prefill and decode engines, each a process.
    set_
        With a scenario, change any field of it, key=value.
    module
        NAME=PATH, the weights of one of several models of a scenario; --model is then the decoder that they share.
        With random weights, each model that is not given has weights of its own.
    role
        Start only this part of a scenario's topology: the server itself (coordinator or frontend), or a worker
        (attention, ffn; prefill, decode). Default: all, on this machine.
    rank
        With --role, the worker's number among those of its role, from 0.
    rendezvous
        HOST:PORT at which the processes of a topology meet, the coordinator's; default: a free port of this machine.
    join_seconds
        Time limit for the processes of a topology to meet, in seconds.
    worker_seconds
        Time limit for a worker's answer, in seconds: no step may take longer.
    max_num_seqs
        Maximum number of running sequences; default 128.
    max_num_batched_tokens
        Maximum tokens of a step, prompts and decodes together; default 2048.
    kv_blocks
        Number of KV cache blocks, 16 tokens each.
    kv_gib
        Memory of the KV cache, instead of a number of blocks; default: 1, or less if the longest context of every
        sequence fits into less.
    one_shot
        Run embeddings, scores, classes and single-token outputs in one step, without a KV cache of their own; otherwise
        they are scheduled like all requests. Default: in one step.
    max_body_mib
        Maximum size of a request's body.
    max_concurrency
        Maximum number of concurrent HTTP requests.
    max_queue
        Maximum number of waiting generations, beyond those that run.
    drain_seconds
        Grace period for running requests at shutdown, in seconds.
    header_seconds
        Time limit for a request's line and headers, in seconds.
    body_seconds
        Time limit for a request's body, in seconds.
    write_seconds
        Time limit for a client to read 64 KiB of its response, or what is left of it, in seconds.
    """
    from workloads.errors import BadInput

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported, which reads it then
    try:
        from live.device import DEFAULT_DTYPE, use_threads
        from live.loaded_model import ModelSource
        from live.server.engine_backend import EngineBackend
        from live.server.flags import EngineFlags
        from live.server.launcher import run
        from live.server.limits import Limits
        from live.server.loading import build_text
        from live.server.server_config import ServerConfig
        from live.server.topology import Place, has_pools, kind_of, serve_bundle, serve_pools
    except ImportError as error:
        raise BadInput(f"expected the extra [live] to be installed ({error})") from None
    use_threads(threads, "--threads")
    _check(max_concurrency=max_concurrency, max_queue=max_queue)
    for field, value in (
        ("--max-body-mib", max_body_mib), ("--drain-seconds", drain_seconds), ("--header-seconds", header_seconds),
        ("--body-seconds", body_seconds), ("--write-seconds", write_seconds),
    ):  # fmt: skip
        if not 0 < value <= MAX_SETTING:
            raise BadInput(f"expected a number above 0, of at most {MAX_SETTING:g}", field=field, value=value)
    config = ServerConfig(
        name=served_model_name or (model.resolve().name if model.is_dir() else model.resolve().stem),
        host=host,
        port=port,
        api_key=os.environ.get(KEY, "") if api_key is None else api_key,
        limits=Limits(
            int(max_body_mib * 2**20), max_concurrency, max_queue, header_seconds, body_seconds, write_seconds
        ),
        drain_seconds=drain_seconds,
    )
    wanted = ModelSource(model, random_weights, dtype or DEFAULT_DTYPE[device], device, threads)
    text = build_text(tokenizer, model, random_weights)
    flags = EngineFlags(max_num_seqs, max_num_batched_tokens, kv_blocks, kv_gib, one_shot)
    place = Place(role, rank, rendezvous, join_seconds, worker_seconds)
    serve = partial(run, config=config, tokenizer=text[0], template=text[1], ends_on_failure=True)
    if scenario is not None and kind_of(scenario) == "afd-bundle":
        return serve_bundle(wanted, flags, scenario, set_ or [], place, serve)
    if scenario is not None and has_pools(scenario, set_ or []):
        return serve_pools(wanted, module or [], flags, scenario, set_ or [], place, serve)
    place.refuse(module or [])
    return run(EngineBackend(_build_engine(wanted, flags, scenario, set_ or [])), config, *text)


def _build_engine(wanted: ModelSource, flags: EngineFlags, scenario: Path | None, changes: list[str]) -> Engine:
    """The engine that a scenario describes, or without one the flags.

    Raises:
        BadInput: flags of the engine beside a scenario, changes without one, or what the engine cannot be built from.
    """
    from live.server.loading import Cache, build_engine, build_planned_engine
    from workloads.errors import BadInput

    if scenario is None:
        if changes:
            raise BadInput("expected it beside --scenario, whose fields it changes", field="--set", value=changes[0])
        sequences = 128 if flags.max_num_seqs is None else flags.max_num_seqs
        tokens = 2048 if flags.max_num_batched_tokens is None else flags.max_num_batched_tokens
        _check(max_num_seqs=sequences)
        return build_engine(
            wanted, Cache(flags.kv_blocks, flags.kv_gib), sequences, tokens, one_shot=flags.one_shot is not False
        )
    from scenarios.kinds import read_scenario
    from scenarios.overrides import single_settings
    from scenarios.single_engine import single_engine

    for name, value in asdict(flags).items():
        if value is not None:
            expected = "expected none beside --scenario, which has the engine's settings: change them by --set engine.…"
            raise BadInput(expected, field=f"--{name.replace('_', '-')}", value=value)
    document = read_scenario(scenario, "serving")
    return build_planned_engine(wanted, single_engine(document, single_settings(changes), scenario))


def _check(**values: int) -> None:
    from workloads.errors import BadInput

    for name, value in values.items():
        if value < 1:
            raise BadInput("expected a whole number from 1 up", field=f"--{name.replace('_', '-')}", value=value)
