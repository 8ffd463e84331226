"""The pieces rehearsed: engines as they serve, and the commands that wait for a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import io
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks import kernels as kernel_benchmark
from benchmarks import live as live_benchmark
from benchmarks import topologies as topology_benchmark
from benchmarks.gpu_turn import environment as environment_stage
from benchmarks.gpu_turn import numbers as numbers_stage
from benchmarks.gpu_turn import variants as variants_stage
from benchmarks.kernels import MISSED
from kernels import microbenchmark
from kernels.sampling import SamplingParams
from kernels.shapes import Shape
from latency_models.timed_runs import ReplayedRun
from live.backend import EngineBackend
from live.engine import Engine, Progress
from live.generation import GREEDY, Generation, make_generation
from live.graphs.executor import GraphExecutor
from live.loaded_model import LoadedModel, ModelSource
from live.models.config import ModelConfig, read_config
from live.models.decoder import Decoder
from live.models.linear import Rounding
from live.models.lora import Adapter, AdapterPart
from live.models.weights import random_weights
from live.server import launcher
from live.server.launcher import GracefulShutdown, listen
from live.server.loading import engine_of_flags
from live.server.options import EngineOptions, ServerConfig
from live.server.service import Service
from live.topologies.bundle.coordinator import BundleLayout
from live.topologies.local import RoleStreams
from live.validation.backend import replay
from schedulers.engine_config import EngineConfig, OneShotBudget
from schedulers.model_slots import SlotsConfig
from schedulers.step_policies import StaticChunks
from tests.live.server.wire import Client
from tests.live.test_host_tier import conversations, offloading
from tests.live.topologies.answers import check_idle, layout, local_bundle, local_pools, serve, settings
from tests.rehearsal.gpu import PretendedGPU
from twin.cli import program
from twin.cli.validate import EXIT_CODES

Piece = Callable[[PretendedGPU], None]

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
TINY = MODELS / "tiny-llama.json"
ON_GPU = ModelSource(TINY, random=True, dtype="bfloat16", device="cuda", threads=1)

CONFIGS = [
    EngineConfig(num_gpu_blocks=2000, max_num_seqs=16, max_num_batched_tokens=2048),
    EngineConfig(num_gpu_blocks=150, max_num_seqs=16, max_num_batched_tokens=512),
    EngineConfig(num_gpu_blocks=2000, max_num_seqs=64, max_num_batched_tokens=8192, one_shot=OneShotBudget(4096, 8)),
]
"""Room for all; few blocks; one-shot work apart."""

EXPERTS = Shape(
    1, 256, 512, heads=8, kv_heads=2, head_dim=64, vocabulary=1000,
    experts=16, experts_per_token=4, expert_intermediate=128, qk_norm=True,
)  # fmt: skip

SCENARIO = """\
schema: twin.scenario/1
kind: validation
name: rehearsed
model: {{path: {model}, weights: random, dtype: bfloat16}}
workload:
  requests: 6
  prefill: {{distribution: lognormal, mean: 64, cv: 0.8}}
  decode: {{distribution: geometric, mean: 8}}
  arrivals: {{process: poisson}}
engine: {{num_gpu_blocks: 512, max_num_seqs: 4, max_num_batched_tokens: 256, async_scheduling: true}}
loads: [0.7]
repeats: 2
profiling: {{rounds: 10, max_steps: 20, max_prompt_tokens: 256, max_output_tokens: 16}}
"""


def shallow(name: str, bits: int = 16) -> Decoder:
    """One layer of an example's shapes."""
    config = read_config(MODELS / f"{name}.json")
    return decoder(replace(config, shape=replace(config.shape, layers=1)), bits)


def decoder(config: ModelConfig, bits: int = 16) -> Decoder:
    """With weights that say nothing, on the pretended device."""
    rounding = None if bits == 16 else Rounding(bits=bits)
    return Decoder(config, random_weights(config, torch.bfloat16, "cuda", 0, rounding))


def twelve_requests(mixed: bool) -> list[Generation]:
    """Twelve requests: all greedy and for tokens alone, or of every kind."""
    rng = np.random.default_rng(0)
    requests = []
    for i in range(12):
        more: dict[str, Any] = {"sampling_params": GREEDY}
        if mixed:
            if i % 4 == 0:
                more["sampling_params"] = SamplingParams(
                    temperature=0.9, top_k=40 * (i % 2), top_p=0.95 if i % 3 else 1.0, seed=i
                )
            more |= {"task": "embed" if i % 6 == 5 else "generate", "logprobs": i % 4 - 1}
            more["prompt_logprobs"] = 2 if i % 4 == 3 else -1
        prompt = rng.integers(1000, size=int(rng.integers(1, 600)))
        requests.append(make_generation(i, prompt, 0 if more.get("task") == "embed" else 1 + i % 12, **more))
    return requests


def alike(i: int, tokens: int, **options: Any) -> Generation:
    """A greedy request, each of which begins as the one before it."""
    return make_generation(i, [1] * (20 + i), tokens, sampling_params=GREEDY, **options)


def answer(engine: Engine, requests: Sequence[Generation]) -> None:
    """Half of the requests at once, the others while these run."""
    half, steps = len(requests) // 2, 0
    for generation in requests[:half]:
        engine.submit(generation)
    while engine.step() is not None:
        steps += 1
        if steps == 3:
            for generation in requests[half:]:
                engine.submit(generation)
    check_idle(engine.core)


def engines(make_decoder: Callable[[], Decoder], thorough: bool = False) -> Piece:
    """Engines in every mode, each serving twice: as it comes, and settled, with graphs of all that has been met.

    If it is to be thorough, with every setting, and for greedy requests alone as well as for every kind.
    """

    def rehearse(gpu: PretendedGPU) -> None:
        model = make_decoder()
        for config in CONFIGS if thorough else CONFIGS[:1]:
            for mixed in (True, False) if thorough else (True,):
                for make, depth in live_benchmark.MODES.values():
                    engine = Engine(model, config, StaticChunks(256), make_executor=make, depth=depth)
                    answer(engine, twelve_requests(mixed))
                    engine.executor.freeze_graphs()
                    answer(engine, twelve_requests(mixed))

    return rehearse


def waiting(gpu: PretendedGPU) -> None:
    """Greedy requests, a step ahead, when everything has been captured: what the host waits for then."""
    engine = Engine(shallow("qwen3-0.6b"), CONFIGS[0], make_executor=GraphExecutor, depth=2)
    for _ in range(2):  # the first time, no prefix is in the cache
        answer(engine, twelve_requests(mixed=False))
    engine.executor.freeze_graphs()
    gpu.forget()
    answer(engine, twelve_requests(mixed=False))


def host_tier(gpu: PretendedGPU) -> None:
    """KV blocks go to host memory and back in the order of the stream, and the host waits for none."""
    config = settings(4, num_gpu_blocks=24, kv_offloading=offloading())
    engine = Engine(shallow("qwen3-0.6b"), config, make_executor=GraphExecutor, depth=2)
    for generation in conversations():
        engine.submit(generation)
        while engine.step() is not None:
            engine.core.check_integrity()
    tiers, host = engine.core.kv_tiers, engine.host_tier
    assert tiers is not None
    assert host is not None
    assert min(tiers.tiers[0].stored, tiers.tiers[0].loaded) > 20
    assert f"a copy of {list(host.content.shape[2:])}" not in gpu.waits


def command(run: Callable[[list[str]], object], *arguments: str) -> Piece:
    """A command, run in a folder that is removed afterwards, with one set of inputs for each measurement.

    Its figures are not read.
    """

    def rehearse(gpu: PretendedGPU) -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.chdir(folder))
            stack.enter_context(mock.patch.dict(microbenchmark.COLD_BYTES, cuda=0))
            stack.enter_context(mock.patch.object(microbenchmark, "WARM_SECONDS", 0.0))
            for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
                stack.enter_context(redirect(io.StringIO()))
            Path("scenario.yaml").write_text(SCENARIO.format(model=TINY), encoding="utf-8")
            code = run(list(arguments))
        assert code in (0, *EXIT_CODES.values(), MISSED), f"exit code {code}"

    return rehearse


def gpu_turn(gpu: PretendedGPU) -> None:
    """Stages at real shapes; some references of `numbers` ask for the device's values, which are not there."""
    for stage in (environment_stage, variants_stage, numbers_stage):
        with mock.patch.object(numbers_stage.Check, "exact", lambda check: check.operation(*check.arguments).double()):
            command(stage.main, "--device", "cuda", "--out", "document.json")(gpu)


def few_graphs(gpu: PretendedGPU) -> None:
    """Not more graphs than there may be: those that are met most often."""
    with mock.patch("live.graphs.executor.MAX_GRAPHS", 3):
        engine = Engine(shallow("qwen3-0.6b"), CONFIGS[0], make_executor=GraphExecutor)
        answer(engine, twelve_requests(mixed=True))
        engine.executor.freeze_graphs()
    assert isinstance(engine.executor, GraphExecutor)
    steps = sorted(engine.executor.steps.values(), key=lambda step: -step.runs)
    assert len(steps) > 3
    assert gpu.captured == 3
    assert steps[0].captured
    answer(engine, twelve_requests(mixed=True))


def server(gpu: PretendedGPU) -> None:
    """`twin serve-live --device cuda`, asked for answers, log-probabilities and embeddings at once."""
    listener = listen("127.0.0.1", 0)
    client = Client(listener.getsockname()[1])
    options = EngineOptions(max_num_seqs=8, max_num_batched_tokens=512)  # the KV cache takes what is free
    engine = engine_of_flags(ON_GPU, options, "model").engine
    statuses: list[int] = []

    def ask_for(i: int) -> None:
        document = {"prompt": list(range(1, 40 + i)), "max_tokens": 1 + 3 * i, "seed": i}
        document |= {"temperature": i % 2, "logprobs": 2} if i % 3 else {"temperature": 0, "stream": True}
        statuses.append(client.post("/v1/completions", **document).status)
        statuses.append(client.post("/v1/embeddings", input=list(range(1, 20 + i))).status)

    def clients(stop: Callable[[], object]) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(ask_for, range(12)))
        stop()

    def ready(service: Service, stopping: GracefulShutdown) -> None:
        stop = partial(asyncio.get_running_loop().call_soon_threadsafe, stopping.stop)
        Thread(target=clients, args=[stop]).start()

    code = asyncio.run(
        launcher.serve(EngineBackend(engine), ServerConfig("tiny"), listener, ready=ready, signals=False)
    )
    assert (code, statuses) == (0, [200] * 24), statuses


def speculation(gpu: PretendedGPU) -> None:
    """`twin serve-live --speculative-config`: steps that verify drafts are replayed."""
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
    options = EngineOptions(max_num_seqs=8, num_gpu_blocks=400, speculative_config=drafts)
    engine = engine_of_flags(ON_GPU, options, "model").engine
    for _ in range(4):
        gpu.forget()
        answer(engine, twelve_requests(mixed=False))
    assert gpu.replayed > 4


def adapters(gpu: PretendedGPU) -> None:
    """Two adapters in turn in one slot, in replayed steps."""
    model = LoadedModel(ON_GPU)
    layer = model.decoder.weights.layers[0]
    assert isinstance(layer.o, torch.Tensor)
    outputs, inputs = layer.o.shape
    part = AdapterPart(torch.ones(4, inputs), torch.ones(outputs, 4), 0)
    config = replace(CONFIGS[1], model_slots=SlotsConfig(1, base="base"))
    engine = model.lora_engine(config, [Adapter(name, 4, {"0.o": [part]}) for name in ("a", "b")])
    for _ in range(2):
        gpu.forget()
        names = ("a", "base", "b") * 4
        answer(engine, [alike(i, 9, model=name) for i, name in enumerate(names)])
    assert gpu.replayed > 10
    assert engine.core.model_loads > 2


def validation(gpu: PretendedGPU) -> None:
    """`twin validate`: while steps are timed, no graph is made."""

    def watched(*arguments: Any) -> ReplayedRun:
        before = gpu.captured
        result = replay(*arguments)
        assert gpu.captured == before
        return result

    with mock.patch("live.validation.backend.replay", watched):
        command(twin, "validate", "scenario.yaml", "--backend", "cuda")(gpu)


def bundle(gpu: PretendedGPU) -> None:
    """A bundle on streams: when everything has been captured, the host waits for inputs and tokens of steps alone."""
    settings = EngineConfig(num_gpu_blocks=400, max_num_seqs=4, max_num_batched_tokens=512, enable_prefix_caching=False)
    for model in (shallow("qwen3-0.6b"), decoder(ModelConfig("m", EXPERTS, max_position_embeddings=4096, tied=False))):
        streams = RoleStreams()
        places = BundleLayout(3, 2, microbatches=2, engine=settings)
        steps: list[int] = []

        def note(progress: Progress, steps: list[int] = steps) -> None:
            steps.append(len(progress.advanced))

        gpu.capture_streams.clear()
        topology = local_bundle(places, model, timekeeper=streams, handover=streams, graphs=True, on_progress=note)
        for _ in range(2):
            gpu.forget()
            steps.clear()
            serve(topology, [alike(i, 12) for i in range(24)])
            assert gpu.captured == 0, "all graphs are made ahead"
        layers = model.config.shape.layers
        assert len(gpu.capture_streams) == 3 * 2 + 2, "one for each microbatch of an attention worker, and each FFN"
        assert gpu.replayed > 8 * layers * 2 * 3
        assert not [wait for wait in gpu.waits if wait in ("an event", "a stream", "the device")]


def pools(gpu: PretendedGPU) -> None:
    """Two prefill engines and a decode engine on streams, with graphs."""
    model, streams = shallow("qwen3-0.6b"), RoleStreams()
    topology = local_pools(layout(2, 1, CONFIGS[1]), model, graphs=True, timekeeper=streams, handover=streams)
    for worker in topology.workers:
        executor = worker.engine.executor
        assert isinstance(executor, GraphExecutor)
        ahead = [*executor.capture_sizes.prompt_shapes(sdpa=True), *executor.capture_sizes.decode_shapes()]
        assert all(executor.steps[shape].captured for shape in ahead), "as those of a single engine"
    gpu.capture_streams.clear()
    for _ in range(3):
        requests = [alike(i, 12) for i in range(24)]
        serve(topology, requests)
        assert all(len(request.output) == 12 for request in requests)
    assert None not in gpu.capture_streams


twin = partial(program(), result_action="return_value")

SHORT_ANSWERS = ("--prompt", "20", "--output", "6", "--repeats", "1")
PIECES: dict[str, Piece] = {
    "qwen3": engines(partial(shallow, "qwen3-0.6b"), thorough=True),
    "llama": engines(partial(shallow, "llama-3.1-8b")),
    "4 bits": engines(partial(shallow, "llama-2-7b", 4)),
    "3 bits": engines(partial(shallow, "llama-3.1-8b", 3)),
    "experts": engines(lambda: decoder(ModelConfig("qwen3_moe", EXPERTS, max_position_embeddings=4096, tied=False))),
    "few graphs": few_graphs,
    "waiting": waiting,
    "host tier": host_tier,
    "bundle": bundle,
    "pools": pools,
    "speculation": speculation,
    "adapters": adapters,
    "twin serve-live": server,
    "twin validate": validation,
    "twin calibrate": command(
        twin, "calibrate", "run", "--device", "cuda", "--model", str(TINY), "--quick", "--no-figures", "-o", "made.yaml"
    ),
    "benchmarks.live": command(
        live_benchmark.main, "--device", "cuda", "--tiny", "--only", "Llama-3.1", "--repeats", "1"
    ),
    "benchmarks.topologies": command(
        topology_benchmark.main, "--device", "cuda", "--model", str(TINY), "--batch-size", "4", *SHORT_ANSWERS
    ),
    "benchmarks.kernels": command(kernel_benchmark.main, "--device", "cuda"),
    "benchmarks.gpu_turn": gpu_turn,
}
