"""The workload of 300 ShareGPT requests at 16 a second (SPEAR 5.1). The paper does not say how they were drawn.

The trace holds every turn of its conversations, with all earlier turns as the prompt. Benchmarks use ShareGPT in
different ways: first turns, filters by length, prompts cut to a length. Each such way is a `Sampling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from papers.data import scenario as read_scenario
from papers.spear.published import HIDDEN, LAYERS, MEMORY, PARAMETERS, RATE, REQUESTS
from workloads.traces import Trace

Kind = Literal["all turns", "first turns", "new tokens", "vllm", "prompt up to", "total up to", "prompt cut to"]

SYNTHETIC = {
    "prefill": {"distribution": "lognormal", "mean": 428.0, "cv": 0.849},
    "decode": {"distribution": "lognormal", "mean": 416.3, "cv": 0.647},
}
"""Without a trace: mean and variation of prompts and answers of the trace's turns with at most 1152 prompt tokens."""


@dataclass(frozen=True)
class Sampling:
    """A way of drawing requests from conversations, up to `tokens`.

    `new tokens`: of each prompt only those that its turn added (the rest is cached). `vllm`: its benchmark's filter,
    prompts of at most 1024 tokens and 2048 in total, neither below 4.
    """

    kind: Kind
    tokens: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.tokens}" if self.tokens else self.kind

    def draw_from(self, trace: Trace) -> Trace:
        """The turns that are drawn from, all equally likely."""
        prompts, answers = trace.prefill_tokens, trace.decode_tokens
        keep = np.ones(len(trace), dtype=np.bool_)
        match self.kind:
            case "first turns":
                keep = ~_continuing(trace)
            case "new tokens":
                before = np.concatenate([[0], (prompts + answers)[:-1]])
                prompts = np.maximum(np.where(_continuing(trace), prompts - before, prompts), 1)
            case "vllm":
                keep = (prompts >= 4) & (answers >= 4) & (prompts <= 1024) & (prompts + answers <= 2048)
            case "prompt up to":
                keep = prompts <= self.tokens
            case "total up to":
                keep = prompts + answers <= self.tokens
            case "prompt cut to":
                prompts = np.minimum(prompts, self.tokens)
        keep &= prompts > 0
        return Trace(f"{trace.name}, {self.name}", None, prompts[keep], answers[keep])


def _continuing(trace: Trace) -> Any:
    """True if a turn's prompt has room for the whole turn before it: the trace lists conversations turn by turn."""
    total = trace.prefill_tokens + trace.decode_tokens
    return np.concatenate([[False], trace.prefill_tokens[1:] >= total[:-1]])


SAMPLINGS = (
    Sampling("all turns"),
    Sampling("first turns"),
    Sampling("new tokens"),
    Sampling("vllm"),
    *(Sampling("prompt up to", tokens) for tokens in (512, 768, 896, 1024, 1152, 1280, 1536, 2048)),
    *(Sampling("total up to", tokens) for tokens in (512, 768, 896, 1024, 1280, 1536, 2048)),
    *(Sampling("prompt cut to", tokens) for tokens in (256, 384, 512, 640)),
)


def scenario(chunking: dict[str, Any], step_time: dict[str, Any], *, synthetic: bool = False) -> dict[str, Any]:
    """One engine under Table 3's load. A trace has to be handed to the plan, unless lengths are `synthetic`."""
    lengths = SYNTHETIC if synthetic else {"trace": {"path": "ShareGPT"}}
    document = read_scenario("spear")
    document["workload"] |= {"requests": REQUESTS, **lengths}
    document["workload"]["arrivals"]["rate"] = RATE
    document["engine"] |= {"num_gpu_blocks": kv_blocks(), "chunking": chunking}
    return document | {"step_time": step_time}


def kv_blocks(block_tokens: int = 16, utilization: float = 0.9) -> int:
    """Blocks of a 16-bit cache that fit beside 4-bit weights. Table 3's load never fills them."""
    return int((MEMORY * utilization - PARAMETERS / 2) // (LAYERS * 2 * HIDDEN * 2 * block_tokens))
