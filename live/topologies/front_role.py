"""The calls that the front of a topology takes from outside: requests, aborts and a stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from live.engine import Progress
from live.generation import Generation
from live.topologies.requests import MAX_END_TOKENS, MOST_LOGPROBS
from live.topologies.transport import Transport


class FrontRole:
    """Base class of rank 0's roles: it queues calls until the role takes them.

    `submit`, `abort` and `stop` may be called at any time, also from another thread; the role is then to be woken.

    Args:
        gives: the workers and their verb, for messages ("a bundle gives").
        max_model_len: tokens of a prompt and its output together, at most.
        on_progress: called with what each step has changed.
    """

    def __init__(
        self, gives: str, max_model_len: int, transport: Transport, on_progress: Callable[[Progress], None]
    ) -> None:
        self._gives, self._max_model_len = gives, max_model_len
        self._transport, self._on_progress = transport, on_progress
        self._generations: dict[int, Generation] = {}
        self._arriving: deque[Generation] = deque()
        self._aborting: deque[int] = deque()
        self._stopping = False

    def check(self, generation: Generation) -> None:
        """Refuse what the workers cannot run.

        Raises:
            ValueError: a request that is too long, or for something else than tokens and their log-probabilities.
        """
        request = generation.request
        tokens = request.prompt_tokens + request.max_tokens
        if request.task != "generate" or generation.prompt_logprobs >= 0:
            expected = "expected output tokens to be wanted, and their log-probabilities at most"
            raise ValueError(f"request {request.id}: {expected}: {self._gives} nothing else")
        if generation.logprobs > MOST_LOGPROBS:
            raise ValueError(f"request {request.id}: expected at most {MOST_LOGPROBS} log-probabilities of a token")
        if not 1 <= request.prompt_tokens <= tokens <= self._max_model_len:
            raise ValueError(
                f"request {request.id}: expected a prompt, and at most {self._max_model_len} prompt and output tokens, "
                f"found {tokens}"
            )
        if len(generation.end_tokens) > MAX_END_TOKENS:
            raise ValueError(f"request {request.id}: expected at most {MAX_END_TOKENS} end tokens")

    def submit(self, generation: Generation) -> None:
        """Queue a request. Raises as `check`."""
        self.check(generation)
        generation.submitted = self._transport.clock()
        self._arriving.append(generation)

    def abort(self, request_id: int) -> None:
        """Abort a request; of one that is finished nothing happens."""
        self._aborting.append(request_id)

    def stop(self) -> None:
        """Abort all requests and end all workers. A second call changes nothing."""
        self._stopping = True
