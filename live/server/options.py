"""The settings of a server, and the options of `twin serve-live`, in groups: each field is a flag with its help."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Annotated, Literal, Self

from cyclopts import Group, Parameter

from workloads.errors import BadInput

KEY = "SERVING_TWIN_API_KEY"
"""Environment variable that holds the API key."""

MAX_SETTING = 1e9
"""Maximum of sizes and times that are given as floats."""


@dataclass(frozen=True)
class ServiceClass:
    """A class that requests may name: its priority, and its goal for the first token, seconds."""

    priority: int = 0
    ttft_goal: float = inf


@Parameter(name="*", group=Group("Model", sort_key=1))
@dataclass(frozen=True)
class ModelOptions:
    """The model and its tokenizer."""

    model: Path
    """A Hugging Face directory; with random weights a config.json."""

    random_weights: Annotated[bool, Parameter(negative=())] = False
    """Random weights of the right shapes. Without a tokenizer, requests and responses hold token ids."""

    tokenizer: Path | None = None
    """Folder of a tokenizer.json; default: the model's."""

    served_model_name: str | None = None
    """The model's name for clients; default: its folder's name."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of weights and KV cache; default: float32 on a CPU, bfloat16 on a GPU."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the model."""

    threads: int = 1
    """CPU threads for one operation."""

    attention_backend: Literal["triton", "sdpa"] | None = None
    """Attention of a prompt's first chunk if alone in its step: PyTorch's (default on a GPU, faster) or our kernel."""

    @property
    def name(self) -> str:
        """The model's name for clients."""
        path = self.model.resolve()
        return self.served_model_name or (path.name if self.model.is_dir() else path.stem)


@Parameter(name="*", group=Group("Engine", sort_key=2))
@dataclass(frozen=True)
class EngineOptions:
    """The engine's settings; None where a flag is not given. Flags have the names of vLLM's."""

    scenario: Path | None = None
    """Scenario of the engine or topology that the twin predicts, in place of the flags below (refused beside it)."""

    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None
    """With a scenario, change any field of it, key=value."""

    max_num_seqs: int | None = None
    """Maximum number of running sequences; default 128."""

    max_num_batched_tokens: int | None = None
    """Maximum tokens of a step, prompts and decodes together; default 2048."""

    num_gpu_blocks: int | None = None
    """Number of KV cache blocks, 16 tokens each."""

    kv_cache_memory_bytes: str | None = None
    """Memory of the KV cache, instead of blocks: bytes, 4G or 512M. Default: 1G on a CPU, what is free on a GPU."""

    tensor_parallel_size: int | None = None
    """Processes (on a GPU with one each) that share each layer; default: as the scenario says, or 1."""

    speculative_config: str | None = None
    """Speculative decoding as vLLM's JSON: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}."""

    lora_modules: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None
    """NAME=PATH of LoRA adapters of the model, each a PEFT directory. Requests name one in their field model."""

    max_loras: int | None = None
    """Maximum number of distinct adapters in a step, with --lora-modules; default 1."""

    one_shot: bool | None = None
    """Run embeddings, scores, classes and single-token outputs in one step, without a KV cache (default)."""

    @property
    def settings(self) -> dict[str, object]:
        """The flags that were given and that a scenario replaces, by name."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        return {
            name: value for name, value in values.items() if name not in ("scenario", "set_", "tensor_parallel_size")
        }

    def refuse_settings(self, expected: str, accepted: Sequence[str] = ()) -> None:
        """Refuse flags that a scenario replaces."""
        for name, value in self.settings.items():
            if name not in accepted:
                raise BadInput(expected, field=flag(name), value=value)


@Parameter(name="*", group=Group("Topology", sort_key=3))
@dataclass(frozen=True)
class TopologyOptions:
    """With a scenario of several workers: their models, which of them this is, and where they meet."""

    module: Annotated[list[str] | None, Parameter(negative=())] = None
    """NAME=PATH, the weights of one of several models of a scenario; --model is then the decoder that they share."""

    decoder_bits: int | None = None
    """With --module, round the linear layers of the decoder that all models share to 4 or 3 bits."""

    role: str | None = None
    """Start only this part: coordinator, attention or ffn; frontend, prefill, decode or engine. Default: all."""

    rank: int = 0
    """With --role, the worker's number among those of its role, from 0."""

    rendezvous: str | None = None
    """HOST:PORT where the processes meet, of the coordinator or frontend; default: a free port of 127.0.0.1."""

    in_process: Annotated[bool, Parameter(negative=())] = False
    """Run all workers in the server's process: on a GPU with a CUDA stream each, on a CPU in turns."""

    join_seconds: float = 10.0
    """Time limit for the processes to meet, in seconds."""

    worker_seconds: float = 6.0
    """Time limit for a worker's answer, in seconds: no step may take longer."""


@Parameter(name="*", group=Group("Server", sort_key=4))
@dataclass(frozen=True)
class ServerOptions:
    """The server's address and its limits on requests and clients."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 8000
    """Port to listen on; 0 takes a free one."""

    api_key: str | None = None
    """Key that clients must send, except to /health, /ping, /version and /metrics; default: $SERVING_TWIN_API_KEY."""

    max_body_mib: float = 4.0
    """Maximum size of a request's body."""

    max_concurrency: int = 1024
    """Maximum number of concurrent HTTP requests."""

    max_queue: int = 2048
    """Maximum number of waiting generations, beyond those that run."""

    drain_seconds: float = 30.0
    """Grace period for running requests at shutdown, in seconds."""

    header_seconds: float = 10.0
    """Time limit for a request's line and headers, in seconds."""

    body_seconds: float = 60.0
    """Time limit for a request's body, in seconds."""

    write_seconds: float = 10.0
    """Time limit for a client to read 64 KiB of its response, or what is left of it, in seconds."""

    @property
    def body_bytes(self) -> int:
        """Maximum size of a request's body."""
        return int(self.max_body_mib * 2**20)

    def checked(self) -> Self:
        """The same, with the key of the environment by default; `BadInput` for limits that are none."""
        for name in ("max_body_mib", "drain_seconds", "header_seconds", "body_seconds", "write_seconds"):
            if not 0 < (value := getattr(self, name)) <= MAX_SETTING:
                raise BadInput(f"expected a number above 0, of at most {MAX_SETTING:g}", field=flag(name), value=value)
        for name in ("max_concurrency", "max_queue"):
            at_least_one(name, getattr(self, name))
        return replace(self, api_key=os.environ.get(KEY, "")) if self.api_key is None else self


@dataclass(frozen=True)
class ServerConfig:
    """The settings of a server: the model's name for clients, its options, and service classes by name."""

    name: str
    options: ServerOptions = ServerOptions()
    classes: Mapping[str, ServiceClass] = field(default_factory=dict)


def flag(name: str) -> str:
    """The flag of a field."""
    return f"--{name.strip('_').replace('_', '-')}"


def at_least_one(name: str, value: int) -> int:
    """The value of a field, if it is 1 or more."""
    if value < 1:
        raise BadInput("expected a whole number from 1 up", field=flag(name), value=value)
    return value


def command_line(*groups: object) -> list[str]:
    """The flags of options that are not their defaults."""
    words: list[str] = []
    for group in groups:
        for option in fields(group):  # type: ignore[arg-type]
            name, value = flag(option.name), getattr(group, option.name)
            if value == option.default:
                continue
            values = value if isinstance(value, list) else [value]
            words += [name] if value is True else [word for each in values for word in (name, str(each))]
    return words
