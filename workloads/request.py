"""The request that a client submits, with all that a scheduler may know of it.

Standard library only, because `schedulers` imports this module and stays free of third-party packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from workloads.errors import BadInput

TASKS: Final = ("generate", "classify", "embed", "score", "rerank", "prompt_logprobs")
"""Tasks of requests. All but the first read a prompt and return a result of a fixed size."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Request:
    """One request.

    `arrival` is in seconds (cycles where a calibration says so), lengths are in tokens. `max_tokens` is the client's
    limit on the answer, 0 for a request without one. The true length is not here: the backend keeps it. `prefix_blocks`
    names the prompt's leading blocks: two requests share their first n blocks exactly when their first n ids are equal.
    `task` is one of `TASKS`; the smaller `priority` goes first, as in vLLM. `session` is the number of the
    conversation, -1 for none. `tenant` is whom a fair order serves in turn with others; `service_class` the contract,
    and `ttft_goal` the seconds within which that promises the first token.

    Raises `BadInput` for an arrival that is negative or not finite, negative tokens, and an unknown task.
    """

    id: int
    arrival: float
    prompt_tokens: int
    max_tokens: int
    model: str = "default"
    prefix_blocks: tuple[int, ...] = ()
    task: str = "generate"
    priority: int = 0
    session: int = -1
    tenant: str = ""
    service_class: str = ""
    ttft_goal: float = inf

    # By hand, because a simulation makes a million of these: what a frozen dataclass generates looks up each name in
    # object.__setattr__ and takes twice as long (1.36 against 0.73 microseconds with Python 3.11).
    def __init__(
        self,
        id: int,
        arrival: float,
        prompt_tokens: int,
        max_tokens: int,
        model: str = "default",
        prefix_blocks: tuple[int, ...] = (),
        task: str = "generate",
        priority: int = 0,
        session: int = -1,
        tenant: str = "",
        service_class: str = "",
        ttft_goal: float = inf,
    ) -> None:
        if not (0.0 <= arrival < inf and prompt_tokens >= 0 and max_tokens >= 0 and task in TASKS):
            raise _unusable(id, arrival, prompt_tokens, max_tokens, task)
        _set_id(self, id)
        _set_arrival(self, arrival)
        _set_prompt_tokens(self, prompt_tokens)
        _set_max_tokens(self, max_tokens)
        _set_model(self, model)
        _set_prefix_blocks(self, prefix_blocks)
        _set_task(self, task)
        _set_priority(self, priority)
        _set_session(self, session)
        _set_tenant(self, tenant)
        _set_service_class(self, service_class)
        _set_ttft_goal(self, ttft_goal)

    @property
    def one_shot(self) -> bool:
        """True if one forward pass serves the request, without decoding: Prelude's OneShot class (its table 1)."""
        return self.max_tokens <= 1 or self.task != "generate"

    @property
    def deadline(self) -> float:
        """When its first token is due, on the clock of `arrival`; infinity without a goal."""
        return self.arrival + self.ttft_goal

    def __repr__(self) -> str:
        """The constructor's call. From `task` on, arguments are left out where they have their defaults."""
        text = (
            f"Request(id={self.id!r}, arrival={self.arrival!r}, prompt_tokens={self.prompt_tokens!r}, "
            f"max_tokens={self.max_tokens!r}, model={self.model!r}, prefix_blocks={self.prefix_blocks!r}"
        )
        task = "" if self.task == "generate" else f", task={self.task!r}"
        priority = f", priority={self.priority!r}" if self.priority else ""
        session = f", session={self.session!r}" if self.session >= 0 else ""
        tenant = f", tenant={self.tenant!r}" if self.tenant else ""
        service_class = f", service_class={self.service_class!r}" if self.service_class else ""
        goal = f", ttft_goal={self.ttft_goal!r}" if self.ttft_goal != inf else ""
        return f"{text}{task}{priority}{session}{tenant}{service_class}{goal})"


(
    _set_id,
    _set_arrival,
    _set_prompt_tokens,
    _set_max_tokens,
    _set_model,
    _set_prefix_blocks,
    _set_task,
    _set_priority,
    _set_session,
    _set_tenant,
    _set_service_class,
    _set_ttft_goal,
) = [vars(Request)[name].__set__ for name in Request.__slots__]


def _unusable(id: int, arrival: float, prompt_tokens: int, max_tokens: int, task: str) -> BadInput:
    checks = (
        ("arrival", arrival, 0.0 <= arrival < inf, "expected a finite time, 0 or later"),
        ("prompt_tokens", prompt_tokens, prompt_tokens >= 0, "expected 0 or more tokens"),
        ("max_tokens", max_tokens, max_tokens >= 0, "expected 0 or more tokens"),
        ("task", task, task in TASKS, f"expected one of {', '.join(TASKS)}"),
    )
    field, value, _, expected = next(check for check in checks if not check[2])
    return BadInput(expected, field=f"request {id}: {field}", value=value)
