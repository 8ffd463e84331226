"""vLLM's default sizes of CUDA graphs."""

from __future__ import annotations

from latency_models.deployment.capture_sizes import vllm_capture_sizes


def test_vllm_captures_up_to_twice_the_sequences() -> None:
    assert vllm_capture_sizes(4) == (1, 2, 4, 8)
    assert vllm_capture_sizes(128)[-2:] == (248, 256)
    assert vllm_capture_sizes(1024)[-1] == 512
