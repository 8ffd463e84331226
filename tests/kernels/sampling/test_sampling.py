"""Sampling against float64, hand values, the published numbers of Philox, and the distributions asked for."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.sampling import reference, triton
from kernels.sampling.parameters import SamplingMetadata, SamplingParams
from kernels.sampling.reference import philox, random_words

SAMPLING_KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=2**64 - 1),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=7),
    SamplingParams(temperature=1.3, top_p=0.5, seed=1),
    SamplingParams(top_k=1, seed=2),
    SamplingParams(top_p=0.0, seed=3),
    SamplingParams(temperature=2.0, top_k=300, min_p=0.01, seed=-4),
    SamplingParams(temperature=3.0, top_p=0.999, seed=5),
]
NEAR = 2**14
"""Of 2³²: 2⁻¹⁸. The argument of an exponential is below 2⁵, which float32 rounds by 2⁻¹⁹; so far are sums, and with
them the number that falls on a boundary between two tokens, from exact."""


def answers(logits: torch.Tensor, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """For each row, what float64 draws for some random number and some top_p within rounding of those given."""
    tokens_of_row: list[set[int]] = [set() for _ in params]
    for near in (-NEAR, 0, NEAR):
        for nudge in (-1, 0, 1):
            with monkeypatch.context() as patched:
                patched.setattr(
                    reference, "random_words", lambda *of, near=near: (random_words(*of) + near).clamp(0, 2**32 - 1)
                )
                nudged = [
                    SamplingParams(
                        w.temperature,
                        w.top_k,
                        min(w.top_p + nudge * 2**-18, 1.0) if w.top_p < 1 else 1.0,
                        w.min_p,
                        w.seed,
                    )
                    for w in params
                ]
                tokens, _ = reference.sample(logits.double().cpu(), batch(nudged))
            for row, token in enumerate(tokens.tolist()):
                tokens_of_row[row].add(token)
    return tokens_of_row


def batch(params: list[SamplingParams], device: str = "cpu") -> SamplingMetadata:
    return SamplingMetadata.of(params, range(100, 100 + len(params)), device)


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 10007 + vocabulary)
    return (3 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (1, torch.float32),
        (63, torch.float16),
        (700, torch.bfloat16),
        pytest.param(5000, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_kernel_draws_what_float64_draws(
    vocabulary: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_of(len(SAMPLING_KINDS), vocabulary, dtype)
    tokens, logprobs = triton.sample(logits.to(device), batch(SAMPLING_KINDS, device))
    for row, allowed in enumerate(answers(logits, SAMPLING_KINDS, monkeypatch)):
        assert tokens[row].item() in allowed, SAMPLING_KINDS[row]
    exact = logits.double().log_softmax(-1).gather(1, tokens.cpu()[:, None])[:, 0]
    torch.testing.assert_close(logprobs.cpu().double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("poisoned")
def test_rows_with_more_candidates_than_the_list_holds(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "CANDIDATES", 32)
    monkeypatch.setattr(triton, "BLOCK", 32)
    logits = logits_of(len(SAMPLING_KINDS), 100, torch.float32)
    tokens, _ = triton.sample(logits.to(device), batch(SAMPLING_KINDS, device))
    for row, allowed in enumerate(answers(logits, SAMPLING_KINDS, monkeypatch)):
        assert tokens[row].item() in allowed, SAMPLING_KINDS[row]


def test_a_token_does_not_depend_on_its_batch(device: str) -> None:
    logits = logits_of(len(SAMPLING_KINDS), 63, torch.float32).to(device)
    together, _ = triton.sample(logits, batch(SAMPLING_KINDS, device))
    for row, params in list(enumerate(SAMPLING_KINDS))[1:4]:
        by_itself, _ = triton.sample(
            logits[row : row + 1].contiguous(), SamplingMetadata.of([params], [100 + row], device)
        )
        assert by_itself[0] == together[row]
    assert torch.equal(reference.sample(logits.cpu(), batch(SAMPLING_KINDS))[0], together.cpu())


def test_greedy_takes_the_first_of_equals_and_never_an_excluded_token(device: str) -> None:
    low = float("-inf")
    logits = torch.tensor([[0.0, 2.0, 2.0, low], [low, low, -5.0, low]], device=device)
    for sample in (reference.sample, triton.sample):
        for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=1, seed=4)):
            tokens, logprobs = sample(logits, batch([params, params], device))
            assert tokens[1] == 2
            assert logprobs[1].item() == pytest.approx(0.0, abs=1e-6)
            if params.temperature == 0:
                assert tokens[0] == 1
            else:  # both are as likely as the likeliest
                assert tokens[0] in (1, 2)


def test_philox_is_what_was_published() -> None:
    """Known answers that come with Random123 (kat_vectors, philox 4x32 10)."""
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    ones = [0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2
    published = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (*ones, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (*pi, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]
    for counter, key, expected in published:
        even, odd = (torch.tensor(counter[first::2])[:, None] for first in (0, 1))
        even, odd = philox(even, odd, torch.tensor(key)[:, None])
        assert [even[0].item(), odd[0].item(), even[1].item(), odd[1].item()] == expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.1, 0.4, 0.2, 0.3]),
        (SamplingParams(temperature=0.5), [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        (SamplingParams(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (SamplingParams(top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (SamplingParams(top_k=3, top_p=0.75), [0, 4 / 7, 0, 3 / 7]),
        (SamplingParams(min_p=0.45), [0, 4 / 9, 2 / 9, 3 / 9]),
    ],
)
def test_shares_are_those_asked_for(params: SamplingParams, expected: list[float]) -> None:
    """top_p of 0.75: 0.4 and 0.3 hold 0.7 of all, too little, but 0.78 of the likeliest three."""
    n = 20000
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().expand(n, 4)
    parameters = SamplingMetadata.of(
        [SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, seed) for seed in range(n)],
        [5] * n,
    )
    shares = reference.sample(logits, parameters)[0].bincount(minlength=4) / n
    for share, exact in zip(shares.tolist(), expected, strict=True):
        assert abs(share - exact) <= 4 * math.sqrt(exact * (1 - exact) / n)


def test_positions_of_one_seed_are_independent_draws() -> None:
    words = random_words(torch.full((20000,), 3), torch.arange(20000)) / 2**32
    assert abs(words.mean().item() - 0.5) < 4 * math.sqrt(1 / 12 / 20000)
    assert abs(torch.corrcoef(torch.stack([words[1:], words[:-1]]))[0, 1].item()) < 4 / math.sqrt(20000)


def test_top_logprobs_are_sorted_and_of_the_model() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    tokens, logprobs = reference.top_logprobs(logits, 3)
    assert tokens.tolist() == [[1, 3, 2]]
    torch.testing.assert_close(logprobs, torch.tensor([[0.4, 0.3, 0.2]]).log())
