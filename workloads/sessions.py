"""Sessions: conversations and agents, whose next prompt grows by what was said.

A session is a series of rounds. A round sends one request, or several branches from one point of the conversation, and
the next round follows all of its answers by a pause: a user thinks, or a tool runs. A prompt repeats what was said
(the earlier prompt and its answer) and adds new text, so that its leading blocks may be in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from workloads.arrivals import Arrivals, ClosedLoop, Pauses
from workloads.checks import number, whole
from workloads.errors import BadInput
from workloads.lengths import Lengths
from workloads.mixes import ModelMix, PrefixStream, SharedPrefixes
from workloads.request import Request

MAX_BRANCHES = 10_000
"""Maximum number of branches of one round."""


class Prompt(NamedTuple):
    """One request of a session, before it is sent; the first `resent_tokens` were a prompt of it and its answer.

    `prefix_blocks` names the blocks of prompt and answer, as far as `max_tokens` allows.
    """

    tokens: int
    resent_tokens: int
    answer_tokens: int
    max_tokens: int
    prefix_blocks: tuple[int, ...]


class Round(NamedTuple):
    """Requests that are sent together; more than one are branches, and the conversation goes on from the first.

    They are sent `pause` seconds after the last answer of the round before, and not before the time `not_before`.
    `agents`: rounds of sub-agents that start at this round's last answer, and which the next round awaits.
    """

    prompts: tuple[Prompt, ...]
    pause: float = 0.0
    not_before: float = 0.0
    agents: tuple[Iterator[Round], ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """One session: its number, its arrival (seconds; 0 in a closed loop), its model, and its rounds, made lazily."""

    id: int
    arrival: float
    model: str
    rounds: Iterator[Round]

    def request(self, prompt: Prompt, id: int, now: float) -> Request:
        """The request that sends a prompt at the time `now`."""
        return Request(id, now, prompt.tokens, prompt.max_tokens, self.model, prompt.prefix_blocks, session=self.id)


@dataclass(frozen=True)
class ToolCalls:
    """Turns that follow a tool call: their `share` of all but the first (else `BadInput`), its time, its result."""

    share: float
    pause: Pauses
    growth: Lengths

    def __post_init__(self) -> None:
        number(self.share, "tools.share", low=0, high=1)


@dataclass(frozen=True)
class Branches:
    """Turns that send `count` requests at once: their `share` of all but the first.

    Raises `BadInput` unless 0 <= share <= 1 and 2 <= count <= 10,000.
    """

    share: float
    count: int

    def __post_init__(self) -> None:
        number(self.share, "branches.share", low=0, high=1)
        whole(self.count, "branches.count", low=2, high=MAX_BRANCHES)


class _Draft(NamedTuple):
    """A round before its prompts are made: (new tokens, answer tokens) of each branch, and the pause before it."""

    branches: list[tuple[int, int]]
    pause: float


@dataclass(frozen=True)
class DrawnSessions:
    """Sessions whose turns, lengths and pauses are drawn from distributions.

    A first prompt has a length of `first`; each later one repeats what was said and adds `growth` tokens, `think`
    seconds after the answer. `tools` and `branches` change some of the later turns. `prefixes` lets first prompts begin
    alike. A session ends before a request that would exceed `max_model_len` tokens; a first request is cut to that.
    Blocks of answers have ids too. Raises `BadInput` where turns, prompts or answers could be empty, and for prefixes
    with other blocks or with `cache_suffix`.
    """

    turns: Lengths
    first: Lengths
    growth: Lengths
    answers: Lengths
    think: Pauses = field(default_factory=lambda: Pauses(0.0))
    tools: ToolCalls | None = None
    branches: Branches | None = None
    arrivals: Arrivals = field(default_factory=ClosedLoop)
    models: ModelMix | None = None
    prefixes: SharedPrefixes | None = None
    max_tokens: int | None = None
    max_model_len: int | None = None
    block_tokens: int = 16

    def __post_init__(self) -> None:
        whole(self.block_tokens, "sessions.block_tokens", low=1)
        if self.max_tokens is not None:
            whole(self.max_tokens, "max_tokens", low=1)
        if self.max_model_len is not None:
            whole(self.max_model_len, "sessions.max_model_len", low=(self.max_tokens or 1) + 1)
        for name, lengths in (("sessions.turns", self.turns), ("prefill", self.first), ("decode", self.answers)):
            if lengths.minimum < 1:
                raise BadInput("expected at least 1 in every draw", field=name, value=lengths.minimum)
        if self.prefixes is not None and self.prefixes.block_tokens != self.block_tokens:
            expected = f"expected {self.block_tokens}, as in sessions.block_tokens"
            raise BadInput(expected, field="prefixes.block_tokens", value=self.prefixes.block_tokens)
        if self.prefixes is not None and self.prefixes.cache_suffix:
            expected = "expected false: every block of a session has an id"
            raise BadInput(expected, field="prefixes.cache_suffix", value=True)

    @property
    def prefix_block_tokens(self) -> int:
        """Prompt tokens that one id of `Request.prefix_blocks` stands for."""
        return self.block_tokens

    @property
    def recorded(self) -> None:
        """None: sessions are drawn without end."""
        return

    @property
    def random(self) -> tuple[str, ...]:
        """Those of sessions, lengths, think times, arrivals, models and prefixes that depend on the generator."""
        lengths, pauses = [self.first, self.growth, self.answers], [self.think]
        mixed = False
        for some in (self.tools, self.branches):
            mixed = mixed or (some is not None and 0 < some.share < 1)
        if self.tools is not None and self.tools.share:
            lengths.append(self.tools.growth)
            pauses.append(self.tools.pause)
        parts = {
            "sessions": mixed or not self.turns.is_constant,
            "lengths": not all(spec.is_constant for spec in lengths),
            "think_times": not all(spec.is_constant for spec in pauses),
            "arrivals": self.arrivals.is_random,
            "models": self.models is not None and len(self.models.models) > 1,
            "prefixes": self.prefixes is not None and self.prefixes.groups > 1,
        }
        return tuple(name for name, is_random in parts.items() if is_random)

    def sessions(self, rng: np.random.Generator, count: int) -> Iterator[Session]:
        """Sessions in order of arrival, which make `count` requests in all, each quantity by a generator of its own."""
        remaining = whole(count, "count", low=0)
        draw = _Drawing(self, rng)
        first_id = 0 if self.prefixes is None else self.prefixes.groups * self.prefixes.shared_blocks
        index = 0
        while remaining:
            drafts = _cut(draw.rounds(remaining), remaining)
            remaining -= sum(len(draft.branches) for draft in drafts)
            rubric = draw.rubric(drafts[0].branches[0][0])
            yield Session(index, draw.arrival(), draw.model(), self._rounds(drafts, first_id, rubric))
            first_id += self._most_blocks(drafts)
            index += 1

    def _rounds(self, drafts: list[_Draft], first_id: int, rubric: tuple[int, ...]) -> Iterator[Round]:
        """The rounds of a session. Its blocks have ids from `first_id` on, after those of the rubric."""
        context, ids, fresh = 0, rubric, first_id
        for draft in drafts:
            prompts = []
            for new, answer in draft.branches:
                tokens, limit = context + new, self.limit(answer)
                count = max((tokens + limit) // self.block_tokens - len(ids), 0)
                prefix = ids + tuple(range(fresh, fresh + count))
                prompts.append(Prompt(tokens, context, answer, limit, prefix))
                fresh += count
            yield Round(tuple(prompts), draft.pause)
            context = prompts[0].tokens + prompts[0].answer_tokens
            ids = prompts[0].prefix_blocks[: context // self.block_tokens]

    def _most_blocks(self, drafts: list[_Draft]) -> int:
        """A number of ids that a session does not exceed."""
        turns = [turn for draft in drafts for turn in draft.branches]
        return sum((new + self.limit(answer)) // self.block_tokens + 2 for new, answer in turns)

    def limit(self, answer: int) -> int:
        """The limit that a client sets on an answer of this many tokens."""
        return answer if self.max_tokens is None else self.max_tokens


class _Drawing:
    def __init__(self, spec: DrawnSessions, rng: np.random.Generator) -> None:
        # All are spawned, used or not, so that a change of one quantity leaves the others as they were.
        (
            self._for_turns, self._for_first, self._for_growth, self._for_answers, for_think, self._for_kinds,
            for_tools, self._for_tool_growth, for_arrivals, self._for_models, for_prefixes,
        ) = rng.spawn(11)  # fmt: skip
        self._spec = spec
        self._think = spec.think.stream(for_think)
        self._tool_pause = None if spec.tools is None else spec.tools.pause.stream(for_tools)
        self._times = spec.arrivals.stream(for_arrivals)
        self._prefixes: PrefixStream | None = None if spec.prefixes is None else spec.prefixes.stream(for_prefixes)

    def arrival(self) -> float:
        return float(self._times(1)[0])

    def model(self) -> str:
        models = self._spec.models
        return "default" if models is None else models.models[int(models.sample(self._for_models, 1)[0])]

    def rubric(self, prompt: int) -> tuple[int, ...]:
        return () if self._prefixes is None else next(iter(self._prefixes(np.array([prompt]))))

    def rounds(self, requests: int) -> list[_Draft]:
        """The rounds of a session, up to one with the last of `requests`, or before `max_model_len` is exceeded."""
        spec, max_len = self._spec, self._spec.max_model_len
        turns = int(spec.turns.sample(self._for_turns, 1)[0])
        drafts: list[_Draft] = []
        context = 0
        for turn in range(turns):
            draft = self._later_round() if turn else self._first_round()
            longest = max(context + new + spec.limit(answer) for new, answer in draft.branches)
            if max_len is not None and longest > max_len:
                break
            drafts.append(draft)
            context += sum(draft.branches[0])
            requests -= len(draft.branches)
            if requests <= 0:
                break
        return drafts

    def _first_round(self) -> _Draft:
        spec = self._spec
        prompt, answer = _one(spec.first, self._for_first), self._answer()
        if spec.max_model_len is not None:
            answer = min(answer, spec.max_model_len - 1)
            prompt = min(prompt, spec.max_model_len - spec.limit(answer))
        return _Draft([(prompt, answer)], 0.0)

    def _later_round(self) -> _Draft:
        spec = self._spec
        growth, rng, pause, branches = spec.growth, self._for_growth, self._think, 1
        after_tool, branching = self._for_kinds.random(2).tolist()
        if spec.tools is not None and self._tool_pause is not None and after_tool < spec.tools.share:
            growth, rng, pause = spec.tools.growth, self._for_tool_growth, self._tool_pause
        if spec.branches is not None and branching < spec.branches.share:
            branches = spec.branches.count
        return _Draft([(_one(growth, rng), self._answer()) for _ in range(branches)], pause())

    def _answer(self) -> int:
        answer = _one(self._spec.answers, self._for_answers)
        return answer if self._spec.max_tokens is None else min(answer, self._spec.max_tokens)


def _one(lengths: Lengths, rng: np.random.Generator) -> int:
    return int(lengths.sample(rng, 1)[0])


def _cut(drafts: list[_Draft], requests: int) -> list[_Draft]:
    rounds: list[_Draft] = []
    for draft in drafts:
        if requests <= 0:
            break
        rounds.append(_Draft(draft.branches[:requests], draft.pause))
        requests -= len(draft.branches)
    return rounds
