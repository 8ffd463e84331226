"""A server in this process, over a tiny model with a tokenizer of bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the live plant needs the extra [live]")
pytest.importorskip("uvicorn", reason="the server needs the extra [live]")

from kernels.sampling import SamplingParams  # noqa: E402
from live.backend import EngineBackend  # noqa: E402
from live.engine import Engine  # noqa: E402
from live.executor import Executor  # noqa: E402
from live.generation import Generation, make_generation  # noqa: E402
from live.graphs.executor import GraphExecutor  # noqa: E402
from live.models.config import read_config  # noqa: E402
from live.models.decoder import Decoder  # noqa: E402
from live.models.weights import random_weights  # noqa: E402
from live.server.input_processor import ChatTemplate  # noqa: E402
from live.server.launcher import GracefulShutdown, listen, serve  # noqa: E402
from live.server.options import ServerConfig, ServerOptions, ServiceClass  # noqa: E402
from live.server.service import Service  # noqa: E402
from live.tokenizer import Tokenizer  # noqa: E402
from schedulers.engine_config import EngineConfig, OneShotBudget  # noqa: E402
from tests.live.server.wire import Client  # noqa: E402

BLOCK = 4
VOCABULARY = 260
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.arguments | tojson }}{% if call.function.arguments.refuse %}"
    "{{ raise_exception(call.function.arguments.refuse) }}{% endif %}{% endfor %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_model(directory: Path, labels: int = 0) -> Path:
    """config.json, a tokenizer of single bytes with an end token, and a chat template."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Making

    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForSequenceClassification" if labels else "Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
    }
    if labels:
        config["id2label"] = {str(i): f"label {i}" for i in range(labels)}
    (directory / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    making = Making(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    making.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    making.decoder = decoders.ByteLevel()
    making.add_special_tokens([AddedToken("<eos>", special=True)])
    making.save(str(directory / "tokenizer.json"))
    tokenizer_config = {"chat_template": TEMPLATE, "eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's."""
    return write_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def decoder(folder: Path) -> Decoder:
    """The model itself."""
    config = read_config(folder)
    return Decoder(config, random_weights(config, torch.float32, "cpu", seed=3))


def config(**settings: Any) -> EngineConfig:
    """An engine with room for all tests, unless said otherwise."""
    base = {"num_gpu_blocks": 400, "max_num_seqs": 32, "one_shot": OneShotBudget(256, 32)}
    return EngineConfig(**{**base, "block_size": BLOCK, "prefix_id_tokens": BLOCK, **settings})


@dataclass
class Setting:
    """A running server, seen from the tests: `service` may be looked at, and touched by `on_loop`."""

    client: Client
    service: Service
    stopping: GracefulShutdown
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    ended: list[int] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        """The engine."""
        backend = self.service.backend
        assert isinstance(backend, EngineBackend)
        return backend.engine

    def on_loop(self, do: Callable[[], Any]) -> Any:
        """Have something done on the event loop."""

        async def doing() -> Any:
            return do()

        return asyncio.run_coroutine_threadsafe(doing(), self.loop).result(10)

    def on_engine(self, do: Callable[[], Any]) -> Any:
        """Have something done on the loop, between steps."""
        finished, result = threading.Event(), []

        def job() -> None:
            result.append(do())
            finished.set()

        self.loop.call_soon_threadsafe(job)
        assert finished.wait(10)
        return result[0]

    def settled(self) -> bool:
        """Tell whether no request is left and all blocks are free. Raises if the scheduler's sums do not agree."""

        def look() -> bool:
            core = self.engine.core
            core.check_integrity()
            return not core.sequences and core.kv_cache.num_free_blocks == core.kv_cache.num_blocks

        return bool(self.on_engine(look)) and self.on_loop(lambda: not self.service.request_states)


@contextlib.contextmanager
def running(
    decoder: Decoder,
    folder: Path | None,
    *,
    engine: EngineConfig | None = None,
    ahead: bool = False,
    classes: dict[str, ServiceClass] | None = None,
    backend: EngineBackend | None = None,
    **options: Any,
) -> Iterator[Setting]:
    """A server on a free port, in a thread, with some `ServerOptions`; without a folder it has no tokenizer.

    `ahead`: its engine is the one that a GPU has, padded and a step ahead. `backend`: in place of an engine of its own.
    """
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    front = ServerConfig("tiny", ServerOptions(port=port, **{"drain_seconds": 5.0, **options}), classes or {})
    up, settings, ended = threading.Event(), [], []

    def ready(service: Service, stopping: GracefulShutdown) -> None:
        settings.append((service, stopping, asyncio.get_running_loop()))
        up.set()

    def work() -> None:
        text = (None, None) if folder is None else (Tokenizer(folder), ChatTemplate.read(folder))
        make: Callable[..., Executor] = GraphExecutor if ahead else Executor
        served = backend or EngineBackend(Engine(decoder, engine or config(), make_executor=make, depth=1 + ahead))
        running = serve(served, front, listener, tokenizer=text[0], template=text[1], ready=ready, signals=False)
        ended.append(asyncio.run(running))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert up.wait(20)
    service, stopping, loop = settings[0]
    setting = Setting(Client(port, front.options.api_key or ""), service, stopping, loop, thread, ended)
    try:
        yield setting
    finally:
        if not ended:
            loop.call_soon_threadsafe(stopping.stop)
            thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(decoder: Decoder, folder: Path) -> Iterator[Setting]:
    """One that the tests of a module share."""
    with running(decoder, folder) as setting:
        yield setting
        assert setting.settled()


def answer_alone(decoder: Decoder, prompt: list[int], max_tokens: int, **fields: Any) -> Generation:
    """The answer of an engine that is called directly and has nothing else to do."""
    engine = Engine(decoder, config())
    generation = make_generation(
        0, prompt, max_tokens, **{"sampling_params": SamplingParams(temperature=0.0), "block_size": BLOCK, **fields}
    )
    engine.submit(generation)
    while engine.step() is not None:
        pass
    return generation
