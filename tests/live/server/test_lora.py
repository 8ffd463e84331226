"""Requests name an adapter in `model`, as with vLLM's --lora-modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.sampling import SamplingParams
from live.backend import EngineBackend
from live.generation import make_generation
from live.loaded_model import ModelSource
from live.server.loading import engine_of_flags
from live.server.options import EngineOptions
from tests.live.server.conftest import running
from tests.live.test_lora import ATTENTION, EVERY, write_adapter
from workloads.errors import BadInput

PROMPT = [72, 5, 33, 120, 7, 61, 100, 4, 18, 3, 9, 27, 81, 44, 2, 11, 90, 1, 5, 77]
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 12, "prompt": PROMPT}


@pytest.fixture(scope="module")
def parts(
    checkpoint: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A model, and two adapters as the flag has them."""
    directory, folder = checkpoint("llama")[0], tmp_path_factory.mktemp("served-adapters")
    one = write_adapter(folder / "one", directory, 4, EVERY, 1)
    two = write_adapter(folder / "two", directory, 2, ATTENTION, 2)
    return directory, [f"one={one}", f"two={two}"]


def build(parts: tuple[Path, list[str]], max_loras: int | None = None) -> EngineBackend:
    source = ModelSource(parts[0], False, "float32", "cpu", 1)
    options = EngineOptions(
        max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks=64, lora_modules=parts[1], max_loras=max_loras
    )
    return engine_of_flags(source, options, "tiny")


def test_each_name_has_its_own_answers(parts: tuple[Path, list[str]]) -> None:
    expected = {}
    for model in ("tiny", "one", "two"):
        engine = build(parts).engine
        generation = make_generation(0, PROMPT, 12, sampling_params=SamplingParams(0.0), model=model)
        engine.submit(generation)
        while engine.step() is not None:
            pass
        expected[model] = generation.output
    assert len({tuple(row) for row in expected.values()}) == 3
    backend = build(parts, 2)
    engine = backend.engine
    with running(engine.executor.decoder, None, backend=backend) as server:
        for model in ("one", "tiny", "two", "one", None):  # the second time, one finds its own prompt in the cache
            fields = {} if model is None else {"model": model}
            answer = server.client.post("/v1/completions", **GREEDY, **fields)
            assert answer.status == 200, answer.body
            assert answer.document["choices"][0]["token_ids"] == expected[model or "tiny"]
        assert engine.core.model_loads == 2
        assert engine.core.cached_tokens == 32  # a block of one's, and one of the base model's
        listed = server.client.get("/v1/models").document["data"]
        assert [row["id"] for row in listed] == ["tiny", "one", "two"]
        assert server.client.post("/v1/completions", **GREEDY, model="three").status == 404


def test_flags_that_do_not_go_together(parts: tuple[Path, list[str]], refusal) -> None:
    with pytest.raises(BadInput, match="a name that the base model has not"):
        build((parts[0], [parts[1][0].replace("one=", "tiny=")]))
    with pytest.raises(BadInput, match="--max-loras"):
        build(parts, 0)
    assert "expected it beside --lora-modules" in refusal("serve-live", "--model", str(parts[0]), "--max-loras", "2")
