"""A quantised model with compensators, written to a directory: the live engine's logits are the training code's."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.shapes import Shape
from live.adaptation.compensation import weight_bytes
from live.adaptation.compensators import CalibrationSettings, calibrate, calibration_text
from live.adaptation.forward import ForwardPass
from live.adaptation.quantisers import Method, Precision, quantise_model, write_compensators, write_quantised
from live.adaptation.training import TrainingSettings
from live.adaptation.weights import initial_weights, read_model, to_named
from live.models.config import ModelConfig
from live.models.linear import COMPENSATORS, Compensated
from live.models.weights import DenseFFN, Weights
from tests.live.adaptation.typed import engine_logits
from tests.live.server.wire import Client
from workloads.errors import BadInput

TOKENS = 24
MODULES = ("layers.0.qkv", "layers.0.down", "layers.1.gate_up", "layers.1.o")


@pytest.fixture
def config() -> ModelConfig:
    """Two layers of width 160: two groups of 128 in each row, of which one is not full."""
    shape = Shape(2, 160, 192, 4, 2, 32, 61, qk_norm=False)
    return ModelConfig(family="llama", shape=shape, max_position_embeddings=64, tied=True)


@pytest.fixture
def write(config: ModelConfig, tmp_path: Path) -> Callable[..., Weights]:
    """Quantises, compensates with few steps and writes to a directory; returns the training code's weights."""

    def write_model(method: Method, precision: Precision) -> Weights:
        forward, weights = ForwardPass(config), initial_weights(config, 0)
        tokens = torch.randint(61, (6, TOKENS), generator=torch.Generator().manual_seed(0))
        model = quantise_model(forward, weights, method, precision, tokens)
        steps = TrainingSettings(steps=3, batch_size=2, learning_rate=1e-2)
        text = calibration_text(forward, model.reference, tokens)
        calibrated = calibrate(forward, model, MODULES, 5, text, CalibrationSettings(steps, steps))
        assert all(parts["second"].abs().max() > 0 for parts in calibrated.parts.values())  # the gates are not 1
        write_quantised(tmp_path, config, model)
        write_compensators(tmp_path, calibrated.stored(), 5)
        return calibrated.stored_weights()

    return write_model


@pytest.mark.parametrize(
    ("method", "precision"),
    [("rtn", Precision(4)), ("gptq", Precision(3)), ("awq", Precision(4, 128)), ("gptq", Precision(3, 128))], ids=str
)  # fmt: skip
def test_the_engine_s_logits_are_those_of_the_training_code(
    config: ModelConfig, write: Callable[..., Weights], tmp_path: Path, method: Method, precision: Precision
) -> None:
    trained = write(method, precision)
    loaded_config, loaded = read_model(tmp_path)
    assert dataclasses.replace(loaded_config, quantisation=None) == config
    assert isinstance(loaded.layers[0].qkv, Compensated)
    assert isinstance(loaded.layers[0].ffn, DenseFFN)
    assert not isinstance(loaded.layers[0].ffn.gate_up, Compensated)
    tokens = torch.randint(61, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        offline, _ = ForwardPass(config)(trained, tokens[None])
        served = engine_logits(config, loaded, tokens[None])[0]
    torch.testing.assert_close(served, offline[0], rtol=1e-4, atol=1e-4)


@contextmanager
def serving(directory: Path) -> Iterator[Client]:
    """The server of a model directory, in a process of its own."""
    command = [sys.executable, "-m", "live.server", "--model", str(directory), "--num-gpu-blocks", "64", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Client(int(process.stdout.readline().split()[0].rpartition(":")[2]))
        finally:
            process.terminate()


@torch.no_grad()
def greedy(config: ModelConfig, weights: Weights, prompt: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """The training code's answer, and the log-probabilities of all tokens at each of its places."""
    forward, answer, logprobs = ForwardPass(config), list[int](), []
    logits, cache = forward(weights, torch.tensor([prompt]))
    while True:
        logprobs.append(logits[0, -1].log_softmax(-1))
        answer.append(int(logits[0, -1].argmax()))
        if len(answer) == tokens:
            return answer, torch.stack(logprobs)
        logits, cache = forward(weights, torch.tensor([answer[-1:]]), cache)


@pytest.mark.parametrize("method", [pytest.param("rtn", marks=pytest.mark.slow), "awq"])
def test_the_server_s_answers_are_those_of_the_training_code(
    config: ModelConfig, write: Callable[..., Weights], tmp_path: Path, method: Method
) -> None:
    trained = write(method, Precision(4))
    generator, tokens = torch.Generator().manual_seed(2), 12
    prompts = [torch.randint(61, (length,), generator=generator).tolist() for length in (5, 17, 30)]
    parameters = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": tokens, "logprobs": 5}
    with serving(tmp_path) as client:
        reply = client.post("/v1/completions", prompt=prompts, **parameters)  # one batch
    assert reply.status == 200, reply.body
    for prompt, choice in zip(prompts, reply.document["choices"], strict=True):
        answer, logprobs = greedy(config, trained, prompt, tokens)
        assert choice["token_ids"] == answer
        assert len(set(answer)) > 1
        expected = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
        for served, offline in zip(choice["logprobs"]["top_logprobs"], logprobs.topk(5).values, strict=True):
            assert sorted(served.values(), reverse=True)[:5] == pytest.approx(offline.tolist(), abs=1e-4)


def test_compensators_change_the_logits(config: ModelConfig, write: Callable[..., Weights], tmp_path: Path) -> None:
    write("rtn", Precision(3))
    tokens = torch.arange(TOKENS)
    with torch.no_grad():
        with_them = engine_logits(config, read_model(tmp_path)[1], tokens[None])[0]
        (tmp_path / COMPENSATORS).unlink()
        without = engine_logits(config, read_model(tmp_path)[1], tokens[None])[0]
    assert (with_them - without).abs().max() > 1e-2


def test_two_bits_are_not_served(config: ModelConfig, write: Callable[..., Weights]) -> None:
    with pytest.raises(BadInput, match=r"bits: got 2, expected 3 or 4: no engine serves others"):
        write("rtn", Precision(2))


Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("0.qkv.up"), r"0.qkv.up: expected this tensor, which is missing"),
        (lambda tensors: tensors.update({"7.o.up": tensors["1.o.up"].clone()}), r"7.o: expected modules of the model"),
        (lambda tensors: tensors.update({"1.o.up": tensors["1.o.up"].float()}), r"1.o.up: .*expected torch.int8"),
        (lambda tensors: tensors.update({"1.o.second": tensors["1.o.first"].clone()}), r"1.o.second: .*expected shape"),
    ],
)
def test_broken_compensators_are_named(
    write: Callable[..., Weights], tmp_path: Path, edit: Callable[[Tensors], object], message: str
) -> None:
    write("rtn", Precision(4))
    tensors = load_file(tmp_path / COMPENSATORS)
    edit(tensors)
    save_file(tensors, tmp_path / COMPENSATORS)
    with pytest.raises(BadInput, match=message):
        read_model(tmp_path)


def test_compensators_need_packed_weights(config: ModelConfig, write: Callable[..., Weights], tmp_path: Path) -> None:
    from live.adaptation.weights import write_model

    write("rtn", Precision(4))
    write_model(tmp_path, config, initial_weights(config, 0))
    with pytest.raises(BadInput, match=r"expected it packed in 3 or 4 bits, since it has an error compensator"):
        read_model(tmp_path)


def test_bytes_of_weights_are_those_of_their_tensors(
    config: ModelConfig, write: Callable[..., Weights], tmp_path: Path
) -> None:
    dense = initial_weights(config, 0)
    assert weight_bytes(dense) == 4 * sum(tensor.numel() for tensor in to_named(dense).values())
    write("rtn", Precision(4))
    with_them = weight_bytes(read_model(tmp_path)[1])
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / COMPENSATORS).values())
    (tmp_path / COMPENSATORS).unlink()
    assert with_them - weight_bytes(read_model(tmp_path)[1]) >= stored  # filled up to whole tiles
