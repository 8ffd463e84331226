"""A bundle gives what one engine gives, and decides what the twin's bundle decides."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from kernels.sampling import SamplingParams
from live.engine import Progress
from live.topologies.bundle.layout import BundleLayout
from live.topologies.bundle.local_bundle import LocalBundle
from tests.live.topologies.answers import CONFIGS, colocated, make_decoder, requests, settings

SHAPES = [(1, 1, 1), (1, 1, 2), (2, 1, 2), (3, 1, 3), (8, 1, 2), (5, 2, 2), (2, 3, 3)]


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize(("attention", "ffn", "microbatches"), SHAPES)
def test_tokens_are_those_of_one_engine(model: str, attention: int, ffn: int, microbatches: int) -> None:
    decoder = make_decoder(model)
    bundle = LocalBundle(BundleLayout(attention, ffn, microbatches, settings(2)), decoder)
    generations = requests(30)
    for generation in generations[:20]:
        bundle.submit(generation)
    bundle.run()
    for generation in generations[20:]:
        bundle.submit(generation)
    bundle.run()
    assert [each.output for each in generations] == colocated(decoder, generations)
    assert {each.finish_reason for each in generations} == {"length"}
    bundle.stop()
    assert bundle.network.ended
