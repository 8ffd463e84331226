"""The command line of the server, for `python -m live.server` and for `twin serve-live`. What is heavy is imported when
it runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

KEY = "SERVING_TWIN_API_KEY"
"""The variable of the environment that a key is taken from."""


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
    max_num_seqs: int = 128,
    max_num_batched_tokens: int = 2048,
    kv_blocks: int | None = None,
    kv_gib: float | None = None,
    one_shot: bool = True,
    max_body_mib: float = 16.0,
    max_concurrency: int = 1024,
    max_queue: int = 2048,
    drain_seconds: float = 30.0,
) -> int:
    """Serve a model over HTTP, with OpenAI's endpoints.

    Prints one line when it takes requests. SIGTERM or Ctrl-C: what is under way is finished, what is new is refused,
    and the exit code is 0; a second one ends it at once, with code 1 if anybody was cut off.

    Parameters
    ----------
    model
        A Hugging Face directory; with random weights a config.json.
    random_weights
        Real shapes that say nothing. Token ids in and out, unless there is a tokenizer.
    tokenizer
        Folder of a tokenizer.json; default: the model's.
    served_model_name
        What clients call the model; default: its folder's name.
    dtype
        Of weights and cache; default: float32 on a CPU, bfloat16 on a GPU.
    device
        Where the model runs.
    threads
        Of the CPU that one operation may use.
    host
        Address to listen on.
    port
        0 takes a free one.
    api_key
        What clients must show, but for /health, /ping, /version and /metrics; default: $SERVING_TWIN_API_KEY.
    max_num_seqs
        Sequences that run at once.
    max_num_batched_tokens
        Tokens a step, prompts and decodes together.
    kv_blocks
        Blocks of 16 tokens that the cache has.
    kv_gib
        Memory for the cache in place of a number of blocks; default 1, or less where every sequence has room for the
        longest context in less.
    one_shot
        Embeddings, scores, classes and answers of one token hold no seat and no cache beyond their step; without it
        they take the way of every other request.
    max_body_mib
        Of one request.
    max_concurrency
        HTTP requests at once.
    max_queue
        Generations that may wait, beyond those that run.
    drain_seconds
        That requests under way have when the server is told to stop.
    """
    from workloads.errors import BadInput

    try:
        from live.device import DEFAULT_DTYPE
        from live.server.loading import Cache, Model, build_engine, build_text
        from live.server.running import Front, run
        from live.server.service import Limits
    except ImportError as error:
        raise BadInput(f"expected the extra [live] to be installed ({error})") from None
    _check(threads=threads, max_num_seqs=max_num_seqs, max_concurrency=max_concurrency, max_queue=max_queue)
    for field, value in (("--max-body-mib", max_body_mib), ("--drain-seconds", drain_seconds)):
        if not 0 < value < float("inf"):
            raise BadInput("expected a number above 0", field=field, value=value)
    front = Front(
        name=served_model_name or (model.resolve().name if model.is_dir() else model.resolve().stem),
        host=host,
        port=port,
        api_key=os.environ.get(KEY, "") if api_key is None else api_key,
        limits=Limits(int(max_body_mib * 2**20), max_concurrency, max_queue),
        drain_seconds=drain_seconds,
    )
    wanted = Model(model, random_weights, dtype or DEFAULT_DTYPE[device], device, threads)
    text = build_text(tokenizer, model, random_weights)
    engine = build_engine(wanted, Cache(kv_blocks, kv_gib), max_num_seqs, max_num_batched_tokens, one_shot)
    return run(engine, front, *text)


def _check(**values: int) -> None:
    from workloads.errors import BadInput

    for name, value in values.items():
        if value < 1:
            raise BadInput("expected a whole number from 1 up", field=f"--{name.replace('_', '-')}", value=value)
