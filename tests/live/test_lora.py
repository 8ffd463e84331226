"""Adapters on the live engine answer as models whose weights have them merged, token by token, in any mixture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.sampling import SamplingParams
from live.engine import Engine
from live.executor import LoRAExecutor
from live.generation import Generation
from live.models.config import ModelConfig, read_config
from live.models.decoder import Decoder
from live.models.lora import load_adapter, load_adapters
from live.models.weights import load_weights
from schedulers.engine_config import EngineConfig
from schedulers.model_slots import SlotsConfig
from tests.live.engines import BLOCK, request, served
from tests.live.test_graphs import replayed_steps
from workloads.errors import BadInput

ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
EVERY = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def write_adapter(
    directory: Path, checkpoint: Path, rank: int, modules: tuple[str, ...], seed: int, **changes: Any
) -> Path:
    """A PEFT directory with adapters large enough to change answers."""
    directory.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in weights_of(checkpoint).items():
        if name.endswith(tuple(f"{module}.weight" for module in modules)):
            outputs, inputs = weight.shape
            full = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            tensors[f"{full}A.weight"] = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
            tensors[f"{full}B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.3
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*modules], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings | changes))
    return directory


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def merge(checkpoint: Path, adapter: Path, into: Path, scale: float) -> Path:
    """A checkpoint whose weights are W + scale B A, in float64."""
    into.mkdir()
    merged, parts = weights_of(checkpoint), load_file(adapter / "adapter_model.safetensors")
    for name, a in parts.items():
        if "lora_A" in name:
            base_name = name.removeprefix("base_model.model.").replace(".lora_A", "")
            b = parts[name.replace("lora_A", "lora_B")]
            merged[base_name] = merged[base_name].double() + scale * b.double() @ a.double()
    save_file({name: weight.contiguous() for name, weight in merged.items()}, into / "model.safetensors")
    (into / "config.json").write_text((checkpoint / "config.json").read_text())
    return into


def decoder_of(directory: Path) -> Decoder:
    config = read_config(directory)
    return Decoder(config, load_weights(directory, config, torch.float64, "cpu"))


def prompts(models: list[str], sampling: SamplingParams) -> list[Generation]:
    generator = torch.Generator().manual_seed(5)
    return [
        request(
            i, torch.randint(0, 199, (3 + 5 * (i % 4),), generator=generator).tolist(), 4 + 3 * (i % 5),
            sampling_params=sampling, model=model, cache_salt=model.encode(),
        )
        for i, model in enumerate(models)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def fine_tuned(
    checkpoint: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Decoder, dict[str, Path], dict[str, Decoder]]:
    """The base model, directories of three adapters, and the models that have them merged."""
    directory, _ = checkpoint("llama")
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {
        "every": write_adapter(folder / "every", directory, 4, EVERY, 1),
        "attention": write_adapter(folder / "attention", directory, 8, ATTENTION, 2),
        "down": write_adapter(folder / "down", directory, 2, ("mlp.down_proj", "self_attn.k_proj"), 3, use_rslora=True),
    }
    scales = {"every": 2.0, "attention": 2.0, "down": 4 / math.sqrt(2)}
    merged = {
        name: decoder_of(merge(directory, path, folder / f"{name}-merged", scales[name]))
        for name, path in adapters.items()
    }
    return decoder_of(directory), adapters, merged


MIXTURE = ["every", "base", "attention", "down", "every", "every", "down", "base", "attention", "down", "every", "base"]


@pytest.fixture(scope="module")
def plain_answers(
    fine_tuned: tuple[Decoder, dict[str, Path], dict[str, Decoder]],
) -> Callable[[float, int], dict[str, list[list[int]]]]:
    """The answers of each model alone, computed once for a temperature and a budget."""
    base, _, merged = fine_tuned

    def compute(temperature: float, budget: int) -> dict[str, list[list[int]]]:
        plain = EngineConfig(200, BLOCK, max_num_batched_tokens=budget, max_num_seqs=8, prefix_id_tokens=BLOCK)
        sampling = SamplingParams(temperature, seed=4)
        models = {"base": base, **merged}
        return {name: served(Engine(model, plain), prompts(MIXTURE, sampling)) for name, model in models.items()}

    return cache(compute)


@pytest.mark.parametrize(
    ("slots", "fixed", "temperature", "budget"),
    [
        (1, False, 0.0, 8), (1, False, 0.9, 64), (2, False, 0.0, 64), (2, False, 0.9, 8), (3, False, 0.0, 8),
        (1, True, 0.9, 8), (1, True, 0.0, 64), (2, True, 0.0, 8), (2, True, 0.9, 64),
    ],
)  # fmt: skip
def test_answers_are_those_of_merged_weights(
    fine_tuned: tuple[Decoder, dict[str, Path], dict[str, Decoder]],
    plain_answers: Callable[[float, int], dict[str, list[list[int]]]],
    slots: int,
    fixed: bool,
    temperature: float,
    budget: int,
) -> None:
    """`fixed`: as captured steps compute adapters, with replays in place of a GPU's graphs."""
    base, directories, _ = fine_tuned
    sampling = SamplingParams(temperature, seed=4)
    adapters = [load_adapter(name, path, base.config, torch.float64) for name, path in directories.items()]
    config = EngineConfig(
        200, BLOCK, max_num_batched_tokens=budget, max_num_seqs=8, prefix_id_tokens=BLOCK,
        model_slots=SlotsConfig(slots, base="base"),
    )  # fmt: skip
    engine = Engine(base, config, make_executor=lambda *parts: LoRAExecutor(*parts, adapters, fixed=fixed))
    memory = replayed_steps(engine) if fixed else None
    generations = prompts(MIXTURE, sampling)
    mixed = served(engine, generations)
    assert engine.core.model_loads >= 3
    assert memory is None or memory.replays > 10
    executor, resident = engine.executor, engine.core.model_slots.resident if engine.core.model_slots else ()
    assert isinstance(executor, LoRAExecutor)
    assert set(executor.slot_of if fixed else executor.slots) == set(resident)
    for model, alone in plain_answers(temperature, budget).items():
        for i, name in enumerate(MIXTURE):
            if name == model:
                assert mixed[i] == alone[i], f"request {i} of {name}"
            elif model == "base" and temperature == 0:
                assert mixed[i] != alone[i] or len(mixed[i]) < 5, "an adapter that changes nothing shows nothing"


@pytest.fixture
def config(checkpoint: Callable[[str], tuple[Path, Any]]) -> ModelConfig:
    return read_config(checkpoint("llama")[0])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"r": 0}, "r: got 0, expected a whole number"),
        ({"lora_alpha": "big"}, "lora_alpha: got 'big', expected a number"),
        ({"use_dora": True}, "use_dora: got True, expected False"),
        ({"bias": "all"}, "bias: got 'all', expected 'none'"),
        ({"r": 5}, "expected shape [5, 48]"),
    ],
)
def test_adapters_that_are_not_served(
    checkpoint: Callable[[str], tuple[Path, Any]], config: ModelConfig, tmp_path: Path, changes: dict[str, Any],
    expected: str,
) -> None:  # fmt: skip
    directory = write_adapter(tmp_path / "a", checkpoint("llama")[0], 4, EVERY, 1, **changes)
    with pytest.raises(BadInput) as raised:
        load_adapter("a", directory, config, torch.float32)
    assert expected in str(raised.value)


def test_adapters_of_other_layers(
    checkpoint: Callable[[str], tuple[Path, Any]], config: ModelConfig, tmp_path: Path
) -> None:
    directory = write_adapter(tmp_path / "a", checkpoint("llama")[0], 4, (*EVERY, "lm_head"), 1)
    with pytest.raises(BadInput, match="expected adapters of q_proj"):
        load_adapter("a", directory, config, torch.float32)
    moe = read_config(checkpoint("qwen3-moe")[0])
    with pytest.raises(BadInput):
        load_adapter("a", directory, moe, torch.float32)


def test_flags_of_adapters(config: ModelConfig) -> None:
    with pytest.raises(BadInput, match="expected NAME=PATH"):
        load_adapters(["a"], config, torch.float32)
    with pytest.raises(BadInput, match=r"adapter_config\.json"):
        load_adapters(["a=/nowhere"], config, torch.float32)


def test_bytes_of_an_adapter(
    fine_tuned: tuple[Decoder, dict[str, Path], dict[str, Decoder]], config: ModelConfig
) -> None:
    _, directories, _ = fine_tuned
    adapter = load_adapter("a", directories["every"], config, torch.float32)
    widths = 2 * (48 + 96) + 2 * (48 + 32) + 3 * (48 + 80)
    assert adapter.bytes == 3 * 4 * widths * 4
