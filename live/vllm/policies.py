"""Policies in vLLM's scheduler: SPEAR's chunk sizes (SPEAR 4.3), and Prelude's lane for one-shot requests (Prelude 3).

vLLM serves one queue of waiting requests, whose first one is held back when all sequences run or the step is full. Here
the queue has two lanes, and its head is the next request that this step can admit. One-shot requests (one output token,
or pooling) have a budget of their own, and wait for no sequence that decodes.

Three things stay vLLM's. A one-shot prompt has KV blocks while it runs. It takes a place in the model runner's batch:
`max_num_seqs` is split into `one_shot.sequences` for one-shots and the rest for all others. And when blocks run out,
neither lane is served. Upstream would need a class of requests without KV blocks and batch places of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from live.vllm.settings import read_settings, vllm_config_of
from schedulers.step_policies import ChunkPolicy


class SizesChunks:
    """Mixin of vLLM's `Scheduler` and `AsyncScheduler`: a chunk policy limits the prompt tokens of each step.

    Before each step `max_num_scheduled_tokens`, which running requests use up first, is set to the rows of its decodes
    and the prompt tokens that the policy allows beside them.
    """

    running: list[Any]
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = vllm_config_of(args, kwargs)
        self.chunk_policy: ChunkPolicy | None = read_settings(config.additional_config).chunk_policy()
        self._token_budget = self.max_num_scheduled_tokens
        stages = config.parallel_config.pipeline_parallel_size
        self._single_rows = not config.speculative_config and stages == 1

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step within the policy's limit."""
        if self.chunk_policy is not None:
            rows, kv_tokens, longest, context = running_work(self.running, self._single_rows)
            limit = rows + self.chunk_policy.max_prefill_tokens(rows, kv_tokens, longest, context)
            self.max_num_scheduled_tokens = min(limit, self._token_budget)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]


def running_work(running: Iterable[Any], single_rows: bool = False) -> tuple[int, int, int, int]:
    """The work of the running requests' next step.

    Returns rows of decodes, drafts included; the cached tokens that all of these attend to, and the longest; and the
    cached tokens of the first prompt under way.

    A decode whose last token is in flight has no row. `single_rows`: every other one has one, without drafts and
    pipeline stages. The loop is the cost of a policy, so it reads little and calls nothing.
    """
    rows = kv_tokens = longest = context = 0
    for request in running:
        computed = request.num_computed_tokens
        if request.is_prefill_chunk:
            context = context or computed
            continue
        pending = request.num_output_placeholders
        if pending and computed + 2 - pending >= request.num_prompt_tokens + request.max_tokens:
            continue
        attended = computed + 1 if single_rows else request.num_tokens_with_spec + pending
        if attended > computed:
            rows += attended - computed
            kv_tokens += attended
            if attended > longest:
                longest = attended
    return rows, kv_tokens, longest, context


class OneShotLanes:
    """A queue of vLLM (`RequestQueue`) with two lanes, and so many tokens and sequences of one-shot work a step."""

    def __init__(self, ordinary: Any, one_shot: Any, tokens: int, sequences: int) -> None:
        self.ordinary = ordinary
        self.one_shot = one_shot
        self.tokens = tokens
        self.sequences = sequences
        self._step_tokens = tokens
        self.begin_step(0, 0)

    def begin_step(self, budget: int, seats: int) -> None:
        """Take the limits of a step: tokens that are left for waiting requests, and places for ordinary ones."""
        self._budget = budget
        self._seats = seats
        self._tokens = self.tokens
        self._sequences = self.sequences

    def _lane(self, request: Any) -> Any:
        """The lane of a request. A prompt that no step can hold whole is chunked like any other."""
        one_shot = request.max_tokens <= 1 and request.num_tokens <= self._step_tokens
        return self.one_shot if one_shot else self.ordinary

    def limit_prompts(self, step_tokens: int) -> None:
        """Take the tokens of a whole step, which a one-shot prompt must not exceed."""
        self._step_tokens = min(self.tokens, step_tokens)

    def _head(self) -> Any:
        """The lane whose first request this step can admit, of two the one that came first; None without any."""
        lanes = []
        if self.ordinary and self._seats > 0 and self._budget > 0:
            lanes.append(self.ordinary)
        if self.one_shot and self._sequences > 0:
            tokens = self.one_shot.peek_request().num_tokens
            if tokens <= min(self._tokens, self._budget):
                lanes.append(self.one_shot)
        if len(lanes) == 2:
            first, second = (lane.peek_request() for lane in lanes)
            return lanes[0] if first < second else lanes[1]
        return lanes[0] if lanes else None

    def __bool__(self) -> bool:
        """True if this step can admit a request."""
        return self._head() is not None

    def peek_request(self) -> Any:
        """The next request that this step can admit."""
        return self._head().peek_request()

    def pop_request(self) -> Any:
        """Take it, and its share of the limits."""
        lane = self._head()
        request = lane.pop_request()
        tokens = min(request.num_tokens, self._budget)
        self._budget -= tokens
        if lane is self.one_shot:
            self._tokens -= tokens
            self._sequences -= 1
        else:
            self._seats -= 1
        return request

    def add_request(self, request: Any) -> None:
        self._lane(request).add_request(request)

    def prepend_request(self, request: Any) -> None:
        """Add a request at the head of its lane."""
        self._lane(request).prepend_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Add requests at the heads of their lanes, each before the one before it, as vLLM's queues do."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Any) -> None:
        self._lane(request).remove_request(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        gone = set(requests)
        self.ordinary.remove_requests(gone)
        self.one_shot.remove_requests(gone)

    def __len__(self) -> int:
        """The number of waiting requests, which this step may not be able to admit."""
        return len(self.ordinary) + len(self.one_shot)

    def __iter__(self) -> Iterator[Any]:
        """The waiting requests, one-shots first."""
        yield from self.one_shot
        yield from self.ordinary


class RunsOneShots:
    """Mixin of vLLM's `Scheduler` and `AsyncScheduler`: a lane for one-shot requests, if the settings have budgets."""

    running: list[Any]
    waiting: Any
    max_num_scheduled_tokens: int
    max_num_running_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = vllm_config_of(args, kwargs)
        budget = read_settings(config.additional_config).one_shot
        self._lanes: OneShotLanes | None = None
        if budget is not None:
            queue = type(self.waiting)
            self._lanes = self.waiting = OneShotLanes(queue(), queue(), budget.tokens, budget.sequences)
            self._lanes.limit_prompts(self.max_num_scheduled_tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, with one-shot requests beside others."""
        if self._lanes is not None:
            budget = self.max_num_scheduled_tokens - running_work(self.running)[0]
            ordinary = 0
            for request in self.running:
                if request.is_prefill_chunk:
                    tokens = request.num_tokens_with_spec + request.num_output_placeholders
                    budget -= tokens - request.num_computed_tokens
                ordinary += request.max_tokens > 1
            self._lanes.begin_step(max(budget, 0), self.max_num_running_reqs - self._lanes.sequences - ordinary)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]
