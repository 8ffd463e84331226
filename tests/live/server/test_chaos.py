"""Two hundred clients, too little memory, and a quarter of them leave when they like."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live.models.decoder import Decoder
from tests.live.server.conftest import Setting, answer_alone, config, running
from tests.live.server.test_life import eventually

CLIENTS = 200


async def client(port: int, fields: dict[str, Any], leave_after: float | None) -> list[int] | None:
    """The token ids of a streamed answer; None for who has left before its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps(fields).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        try:
            async with asyncio.timeout(leave_after):
                answer = await reader.read()
        except TimeoutError:
            return None
    finally:
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    lines = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: ")]
    assert lines.count(b"[DONE]") == 1
    assert lines[-1] == b"[DONE]"
    pieces = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert [piece["finish_reason"] for piece in pieces].count("length") == 1, "answered twice, or not to the end"
    assert pieces[-1]["finish_reason"] == "length"
    return [token for piece in pieces for token in piece["token_ids"]]


@pytest.mark.parametrize(
    "ahead",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["waiting for each step", "a step ahead"],
)
def test_nothing_is_lost_and_nothing_answered_twice(ahead: bool, decoder: Decoder, folder: Path) -> None:
    rng = np.random.default_rng(4)
    common = rng.integers(0, 256, 12).tolist()
    kinds = [
        (common * int(i % 3 == 0) + rng.integers(0, 256, int(rng.integers(1, 30))).tolist(), int(rng.integers(1, 24)))
        for i in range(40)
    ]
    expected = [answer_alone(decoder, prompt, max_tokens).output for prompt, max_tokens in kinds]
    leaving = random.Random(9)
    leave = [leaving.uniform(0.0, 1.5) if i % 4 == 0 else None for i in range(CLIENTS)]

    async def everybody(port: int) -> list[list[int] | None]:
        fields = [
            {
                "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
                "return_token_ids": True,
            }
            for prompt, max_tokens in kinds
        ]  # fmt: skip
        return await asyncio.gather(*(client(port, fields[i % 40], leave[i]) for i in range(CLIENTS)))

    small = config(num_gpu_blocks=40, max_num_seqs=16, max_num_batched_tokens=64)
    with running(decoder, folder, engine=small, ahead=ahead) as setting:
        answers = asyncio.run(everybody(setting.client.port))
        check(setting, answers, expected)


def check(setting: Setting, answers: list[list[int] | None], expected: list[list[int]]) -> None:
    """Each client that stayed has the answer that it would have had alone; nothing is left behind."""
    stayed = [i for i in range(CLIENTS) if i % 4]
    for i in stayed:
        assert answers[i] == expected[i % 40], f"client {i}"
    assert eventually(setting.settled)
    core, reasons = setting.engine.core, setting.service.stats.reasons
    assert core.preemptions > 0
    assert core.cached_tokens > 0
    assert reasons["abort"] > 5
    assert sum(reasons.values()) <= CLIENTS
    full = sum(answer is not None for answer in answers)
    assert reasons["length"] >= full >= len(stayed)
    assert reasons["error"] == 0
