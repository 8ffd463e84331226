"""Padded steps give what unpadded ones give, and an engine a step ahead gives what one does that waits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.sampling import SamplingParams
from kernels.shapes import Shape
from live.block_pool import BlockPool
from live.engine import Engine
from live.executor import Executor
from live.generation import Generation
from live.graphs.capture_sizes import CaptureSizes, StepShape, powers, sizes
from live.graphs.executor import MOST_EXTRA_ROWS, GraphExecutor, pad_steps
from live.loaded_model import ModelSource
from live.models.config import ModelConfig
from live.models.decoder import Decoder
from live.models.weights import random_weights
from live.validation.backend import LiveBackend
from schedulers.engine_config import EngineConfig
from schedulers.step_policies import StaticChunks
from tests.live.engines import CONFIGS, GREEDY, config, drain, prompts, request, requests, served

MAKERS: dict[str, tuple[Callable[..., Executor], int]] = {
    "a step ahead": (Executor, 2),
    "padded": (GraphExecutor, 1),
    "padded, a step ahead": (GraphExecutor, 2),
}


@pytest.fixture(scope="module")
def decoder(models: tuple[Decoder, Any]) -> Decoder:
    return models[0]


SIX = config(90, max_num_seqs=6)


def one_by_one(engine: Engine, generations: list[Generation]) -> list[list[int]]:
    """The outputs of requests of which each comes a step after the one before."""
    for generation in generations:
        engine.submit(generation)
        engine.step()
    drain(engine)
    return [generation.output for generation in generations]


def mixed_requests(style: str) -> list[Generation]:
    """Twelve requests, of which some stop early; all greedy and for tokens alone, or of every kind."""
    generations = []
    for i, prompt in enumerate(prompts()):
        more: dict[str, Any] = {"end_tokens": frozenset(range(i, 199, 9))} if i % 2 else {}
        if style == "mixed":
            sampling = SamplingParams(temperature=0.9, top_k=40 * (i % 2), top_p=0.95, seed=i)
            more |= {
                "sampling_params": sampling if i % 4 == 0 else GREEDY,
                "task": "embed" if i % 6 == 5 else "generate",
            }
            more |= {"logprobs": i % 4 - 1, "prompt_logprobs": 2 if i % 4 == 3 else -1}
            if i % 5 == 1:
                more |= {"stop_check": lambda token: token % 7 == 0, "min_tokens": 3}
        max_tokens = 0 if more.get("task") == "embed" else 3 + 2 * i
        generations.append(request(i, prompt, max_tokens, **more))
    return generations


@pytest.fixture(scope="module")
def waited_for(decoder: Decoder) -> Callable[[str, str], list[Generation]]:
    """The answers of an engine that waits for each step and pads none, computed once."""
    return cache(lambda name, style: answers(decoder, name, style, Executor, 1))


def answers(decoder: Decoder, name: str, style: str, make: Callable[..., Executor], depth: int) -> list[Generation]:
    engine = Engine(decoder, CONFIGS[name], StaticChunks(32), make_executor=make, depth=depth)
    generations = mixed_requests(style)
    for generation in generations[:8]:
        engine.submit(generation)

    def later(number: int) -> None:
        if number == 3:
            for generation in generations[8:]:
                engine.submit(generation)
        if number in (5, 9):
            engine.abort(7 + number % 2)

    drain(engine, later)
    if name.startswith("few"):
        assert engine.core.preemptions > 0
    if name == "leaders":
        assert engine.core.cached_tokens > 0
    return [*generations[:7], *generations[9:]]  # when the others were aborted may differ


@pytest.mark.parametrize(
    ("kind", "style"), [("a step ahead", "mixed"), ("padded", "greedy"), ("padded, a step ahead", "mixed")]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_answers_do_not_depend_on_how_steps_are_run(
    name: str, kind: str, style: str, decoder: Decoder, waited_for: Callable[[str, str], list[Generation]]
) -> None:
    for result, exact in zip(answers(decoder, name, style, *MAKERS[kind]), waited_for(name, style), strict=True):
        assert (result.output, result.finish_reason) == (exact.output, exact.finish_reason)
        assert [[token for token, _ in top] for top in result.top_logprobs] == [
            [t for t, _ in top] for top in exact.top_logprobs
        ]
        assert result.token_logprobs == pytest.approx(exact.token_logprobs, abs=1e-4)
        assert result.prompt_token_logprobs[1:] == pytest.approx(exact.prompt_token_logprobs[1:], abs=1e-4)
        assert (result.pooled_output is None) == (exact.pooled_output is None)
        if exact.pooled_output is not None:
            np.testing.assert_allclose(result.pooled_output, exact.pooled_output, atol=1e-4)


def test_sizes_grow_by_a_bounded_part() -> None:
    assert sizes(100, 2) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    assert sizes(40, 4) == [1, 2, 4, 8, 16, 20, 24, 28, 32, 40]
    assert sizes(3, 2) == [1, 2, 3]
    assert powers(64, 4, 1000) == [64, 256, 1000]


def test_a_batch_gets_the_smallest_shape_that_holds_it() -> None:
    capture_sizes = CaptureSizes(100, 120, 4096, 2000, max_captured_tokens=512)
    assert capture_sizes.shape(0, 3, 130, 9, True) == StepShape(0, 4, 160, 64, True)
    assert capture_sizes.shape(9, 1, 1, 65, False) == StepShape(32, 1, 16, 256, False)
    assert capture_sizes.shape(17, 0, 0, 2000, True) == StepShape(24, 0, 0, 2000, True)
    assert capture_sizes.shape(17, 2, 513, 70, True) == StepShape(17, 2, 513, 70, True, captured=False)
    assert CaptureSizes(100, 120, 8192, 2000).shape(0, 1, 4097, 70, True).tokens == 4608


def test_shapes_made_ahead_hold_every_prompt_step_but_long_ones() -> None:
    capture_sizes = CaptureSizes(100, 120, 8192, 2000)
    ahead = capture_sizes.prompt_shapes()
    for decodes, chunks, tokens, blocks in ((0, 1, 1, 1), (8, 4, 65, 64), (9, 2, 1025, 300), (100, 3, 2048, 2000)):
        shape = capture_sizes.shape(decodes, chunks, tokens, blocks, True)
        extra = min(other.rows - shape.rows for other in ahead if other.holds(shape))
        assert extra <= max(MOST_EXTRA_ROWS, tokens)
    with_sdpa = set(capture_sizes.prompt_shapes(sdpa=True)) - set(ahead)
    assert {(shape.chunks, shape.no_context) for shape in with_sdpa} == {(1, True)}
    assert capture_sizes.shape(3, 1, 600, 64, True, no_context=True).no_context
    assert not capture_sizes.shape(3, 1, 9000, 64, True, no_context=True).no_context, "it is not padded"
    assert not any(shape.holds(capture_sizes.shape(0, 1, 512, 1, True)) for shape in with_sdpa), "it may have context"
    assert not any(other.holds(capture_sizes.shape(0, 1, 2049, 1, True)) for other in ahead)
    assert not any(other.holds(capture_sizes.shape(1, 0, 0, 1, True)) for other in ahead), "nor decodes alone"


@dataclass
class ReplayedGraphs:
    """In place of a GPU's graphs: a replay launches the step again and overwrites its result."""

    replays: int = 0

    def capture(self, launch: Any) -> tuple[ReplayedGraphs.Graph, torch.Tensor]:
        shape: StepShape = launch.__self__.shape
        result = torch.zeros(shape.decodes + shape.chunks, dtype=torch.int64)
        return self.Graph(self, launch, result), result

    @dataclass
    class Graph:
        memory: ReplayedGraphs
        launch: Callable[[], torch.Tensor]
        result: torch.Tensor

        def replay(self) -> None:
            self.memory.replays += 1
            self.result.copy_(self.launch())


class ReplayedForward(ReplayedGraphs):
    """The same for steps whose results are hidden states."""

    def capture(self, launch: Any) -> tuple[ReplayedGraphs.Graph, torch.Tensor]:
        result = launch().clone()
        return self.Graph(self, launch, result), result


def replayed_steps(engine: Engine) -> ReplayedForward:
    """Let an engine's steps be padded and, from the third of a shape on, replayed."""
    padded, memory = pad_steps(engine.executor, engine.core.config), ReplayedForward()
    padded._memory = memory  # type: ignore[assignment]
    return memory


@pytest.mark.parametrize("frozen", [False, True])
def test_a_shape_without_a_graph_runs_as_a_larger_graph(decoder: Decoder, frozen: bool) -> None:
    outputs = []
    for graphs in (False, True):
        engine = Engine(decoder, SIX, make_executor=GraphExecutor)
        executor = engine.executor
        assert isinstance(executor, GraphExecutor)
        if graphs:
            memory = ReplayedGraphs()
            executor._memory = memory  # type: ignore[assignment]
            executor.warm_up([*executor.capture_sizes.prompt_shapes(), executor.capture_sizes.shape(6, 0, 0, 1, True)])
            if frozen:
                executor.freeze_graphs()
            ahead, before = set(executor.steps), memory.replays
        outputs.append(one_by_one(engine, requests(prompts()[:5], 6, 6)))
    assert outputs[0] == outputs[1]
    assert memory.replays > before
    met = [step for shape, step in executor.steps.items() if shape not in ahead]
    assert any(not step.runs for step in met), "some only ran as larger ones"
    assert any(step.captured for step in met) != frozen, "the most frequent got graphs of their own"


def test_a_prompt_without_context_is_left_to_pytorch(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone in its step, beside decodes, in chunks of which the second has context, padded, and as a larger graph."""
    for module in ("executor", "capture_sizes"):
        monkeypatch.setattr(f"live.graphs.{module}.SDPA_TOKENS", 2)
    outputs = []
    for backend in ("triton", "sdpa"):
        chosen = copy.copy(decoder)
        chosen.attention_backend = backend
        engine = Engine(chosen, SIX, StaticChunks(32), make_executor=GraphExecutor)
        executor = engine.executor
        assert isinstance(executor, GraphExecutor)
        memory = ReplayedGraphs()
        executor._memory = memory  # type: ignore[assignment]
        executor.warm_up(executor.capture_sizes.prompt_shapes(sdpa=backend == "sdpa"))
        outputs.append(one_by_one(engine, requests(prompts()[:9], 9)))
    assert outputs[0] == outputs[1]
    kinds = [(shape.no_context, shape.decodes > 0) for shape, step in executor.steps.items() if step.runs > 2]
    assert {(True, True), (False, True)} <= set(kinds)


def test_shapes_are_made_ahead_and_met_again(decoder: Decoder) -> None:
    engine = Engine(decoder, SIX, make_executor=GraphExecutor, depth=2)
    executor = engine.executor
    assert isinstance(executor, GraphExecutor)
    executor.warm_up([executor.capture_sizes.shape(n, 0, 0, 1, True) for n in (1, 2, 3, 6)])
    assert not executor.cache.keys.any()
    served(engine, requests(prompts()[:3], 9))
    assert {shape.decodes for shape in executor.steps if not shape.chunks} == {1, 2, 4, 6}


def test_a_table_may_reach_behind_what_a_chunk_needs(decoder: Decoder) -> None:
    """80 blocks are reserved, and the first chunk, of 32 tokens, is given a table of 64."""
    settings = config(200, block_size=1, kv_reservation="max_tokens")
    engines = [Engine(decoder, settings, StaticChunks(32), make_executor=make) for make in (Executor, GraphExecutor)]
    first, second = (served(engine, [request(0, prompts()[7], 41)]) for engine in engines)
    assert first == second


def test_an_executor_serves_another_engine(decoder: Decoder) -> None:
    executors: list[GraphExecutor] = []

    def make(decoder: Decoder, pool: BlockPool, config: EngineConfig) -> GraphExecutor:
        executors.append(executors[0].reset(pool) if executors else GraphExecutor(decoder, pool, config))
        return executors[0]

    outputs = []
    for _ in range(2):
        engine, generations = Engine(decoder, SIX, make_executor=make, depth=2), requests(prompts(), 6)
        for generation in generations:
            engine.submit(generation)
        for _ in range(4):
            engine.step()
        outputs.append([len(generation.output) for generation in generations])  # given up in the middle of everything
    assert outputs[0] == outputs[1]
    assert executors[0] is executors[1]
    drain(engine)
    assert [generation.output for generation in generations] == served(Engine(decoder, SIX), requests(prompts(), 6))


def test_rows_that_fill_up_write_nothing(decoder: Decoder) -> None:
    """Three decodes in a step of four, and a prompt of five in one of sixteen: what is cached is what is theirs."""
    written = []
    for make in (Executor, GraphExecutor):
        engine = Engine(decoder, SIX, make_executor=make)
        served(engine, requests(prompts()[:3], 6))
        written.append(engine.executor.cache)
    torch.testing.assert_close(written[0].keys, written[1].keys)
    torch.testing.assert_close(written[0].values, written[1].values)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are a GPU's")
@pytest.mark.parametrize("depth", [1, 2])
def test_graphs_give_what_the_same_steps_give_launched_one_by_one(depth: int) -> None:
    shape = Shape(2, 128, 256, heads=4, kv_heads=2, head_dim=64, vocabulary=512)
    config = ModelConfig("llama", shape, max_position_embeddings=512, tied=True)
    decoder = Decoder(config, random_weights(config, torch.bfloat16, "cuda"))
    engine_config = EngineConfig(num_gpu_blocks=200, max_num_seqs=8)
    outputs = []
    for graphs in (False, True):
        engine = Engine(decoder, engine_config, make_executor=partial(GraphExecutor, graphs=graphs), depth=depth)
        outputs.append(served(engine, requests([range(1, 30 + i) for i in range(12)], 40, block_size=16)))
        captured = [step.captured for step in engine.executor.steps.values()]
        assert any(captured) == graphs
    assert outputs[0] == outputs[1]


def test_engines_of_a_backend_share_what_was_captured() -> None:
    model = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama.json"
    source = ModelSource(model, random=True, dtype="float32", device="cpu", threads=1)
    backend = LiveBackend(source, async_scheduling=True)
    config = EngineConfig(num_gpu_blocks=300, max_num_seqs=3)
    engines = [
        Engine(backend.decoder, settings, make_executor=backend._graph_executor)
        for settings in (config, replace(config))
    ]
    executor = engines[0].executor
    assert engines[1].executor is executor
    assert isinstance(executor, GraphExecutor)
    assert set(executor.steps) == {StepShape(n, 0, 0, blocks, True) for n in (1, 2, 3) for blocks in (64, 256)}
    second = Engine(backend.decoder, replace(config, num_gpu_blocks=100), make_executor=backend._graph_executor)
    assert second.executor is not executor
