"""What the endpoints share: the model, its text layer, the engine, and what a request may ask of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kernels.sampling import Wish
from live.device import versions
from live.engine import Engine
from live.generation import Generation, ask
from live.server.errors import ApiError, bad_request, busy
from live.server.exchange import Exchange
from live.server.metrics import Page, Tally
from live.server.protocol import Generating, Prompts, Templated
from live.server.worker import Group, Worker
from live.text.chat import ChatTemplate
from live.text.stream import TextStream
from live.text.tokenizer import Tokenizer
from workloads.errors import BadInput


@dataclass(frozen=True)
class Limits:
    """What the server takes on.

    Attributes:
        body_bytes: of one request. requests: HTTP requests at once. queue: generations beyond those that can run at
            once.
    """

    body_bytes: int = 16 << 20
    requests: int = 1024
    queue: int = 2048


@dataclass
class Service:
    """One model behind its names.

    Attributes:
        name: what clients call it. api_key: what they must show, "" for nothing.
        contexts: tokens that a prompt and its answer may have together. draining: no new work is taken in.
        seeds: of requests that bring none.
    """

    name: str
    engine: Engine
    worker: Worker
    tally: Tally
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    limits: Limits = field(default_factory=Limits)
    api_key: str = ""
    draining: bool = False
    seeds: random.Random = field(default_factory=random.Random)
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        config, core = self.engine.executor.decoder.config, self.engine.core
        self.labels, self.hidden = config.labels, config.shape.hidden
        self.vocabulary = config.shape.vocabulary
        self.contexts = min(config.positions, core.config.kv_blocks * core.config.block_tokens)
        self.id_tokens = core.config.prefix_id_tokens
        self.version = versions().get("serving-twin", "unknown")
        self.page = Page(self.tally, self.engine, self.name)
        known = self.tokenizer.end_tokens if self.tokenizer is not None else frozenset()
        self.end_tokens = frozenset([*config.end_tokens, *(each for each in known if each is not None)])

    def check(self, model: str | None) -> None:
        """Refuse a request that is not for this model, or that comes at a bad moment.

        Raises:
            ApiError: 404 or 503.
        """
        if model is not None and model != self.name:
            raise ApiError(404, f"model: expected {self.name}, found {model}", param="model", code="model_not_found")
        if self.draining:
            raise busy(503, "the server is shutting down")
        if self.worker.failure is not None:
            raise self.worker.failure

    def check_speaks(self) -> None:
        """Refuse tokens of a model that only tells classes.

        Raises:
            ApiError: 400.
        """
        if self.labels:
            raise bad_request("model", f"{self.name} tells classes and gives no tokens: see /classify, /score, /rerank")

    def check_generating(self, asked: Generating) -> None:
        """Refuse tokens of a model that gives none, and wishes about streams that contradict each other.

        Raises:
            ApiError: 400.
        """
        self.check_speaks()
        if asked.stream and asked.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs", "not served in a stream")
        if asked.stream_options is not None and not asked.stream:
            raise bad_request("stream_options", "expected stream to be true")

    def check_room(self, generations: int) -> None:
        """Refuse what the queue does not hold.

        Raises:
            ApiError: 503, or 400 for more than it would ever hold.
        """
        most = self.engine.core.config.max_num_seqs + self.limits.queue
        if generations > most:
            raise bad_request(None, f"expected at most {most} prompts times n, found {generations}")
        if len(self.worker.tickets) + generations > most:
            raise busy(503, f"the queue is full: {len(self.worker.tickets)} generations run or wait, at most {most}")

    @contextmanager
    def group(self, exchange: Exchange) -> Iterator[Group]:
        """The generations of one exchange; whatever still runs at the end, or when the client leaves, is taken back."""
        group = Group(self.worker)
        exchange.when_gone(group.leave)
        try:
            yield group
        finally:
            group.close()

    # -- text --------------------------------------------------------------------------------------------------------

    @property
    def words(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ApiError: 400 where the server has none.
        """
        if self.tokenizer is None:
            raise bad_request(None, "this server has no tokenizer: it takes token ids and gives token ids")
        return self.tokenizer

    def prompts(self, given: Prompts, name: str, special: bool = True) -> list[list[int]]:
        """The token ids of one prompt or a batch.

        Raises:
            ApiError: 400: a prompt without tokens or with ids that the model does not have.
        """
        batch = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        return [self._ids(each, name, special) for each in batch]

    def _ids(self, prompt: str | list[int], name: str, special: bool) -> list[int]:
        ids = self.words.encode(prompt, special) if isinstance(prompt, str) else prompt
        return self.checked(ids, name)

    def checked(self, ids: list[int], name: str) -> list[int]:
        """A prompt that can be run.

        Raises:
            ApiError: 400.
        """
        if not ids:
            raise bad_request(name, "expected a prompt of at least 1 token, found none")
        if max(ids) >= self.vocabulary:
            raise bad_request(name, f"expected token ids below {self.vocabulary}, found {max(ids)}")
        if len(ids) > self.contexts:
            raise self._too_long(len(ids), 0, name)
        return ids

    def piece(self, token: int) -> str:
        """A token as text."""
        return f"token_id:{token}" if self.tokenizer is None else self.tokenizer.piece(token)

    def rendered(self, asked: Templated) -> list[int]:
        """The token ids of a chat.

        Raises:
            ApiError: 400: no template, or one that refuses these messages.
        """
        words = self.words
        if self.template is None:
            raise bad_request("messages", "this model has no chat template")
        messages = [message.model_dump(exclude_none=True) for message in asked.messages]
        start = asked.add_generation_prompt is not False
        try:
            text = self.template.render(
                messages, tools=asked.tools, add_generation_prompt=start, **(asked.chat_template_kwargs or {})
            )
        except BadInput as error:
            raise bad_request("messages", error.expected) from None
        except TypeError:  # two values for one name
            raise bad_request("chat_template_kwargs", "expected no names that the request has fields for") from None
        return self.checked(words.encode(text, special=False), "messages")

    # -- generations -------------------------------------------------------------------------------------------------

    def most(self, prompt: list[int], wanted: int, name: str) -> int:
        """So many output tokens, if they fit.

        Raises:
            ApiError: 400.
        """
        if len(prompt) + wanted > self.contexts:
            raise self._too_long(len(prompt), wanted, name)
        return wanted

    def _too_long(self, prompt: int, wanted: int, name: str) -> ApiError:
        return bad_request(
            name,
            f"expected at most {self.contexts} tokens, the prompt's {prompt} and {wanted} of the answer are more",
            "context_length_exceeded",
        )

    def generation(
        self,
        asked: Generating,
        prompt: list[int],
        most: int,
        seed: int,
        *,
        until: Callable[[int], bool] | None,
        top: int,
        prompt_top: int,
    ) -> Generation:
        """A generation as a client wants it; `until`, `top` and `prompt_top` as `Generation` has them."""
        return ask(
            self.worker.number(),
            prompt,
            most,
            wish=_wish(asked, seed),
            end_tokens=self._ends(asked),
            fewest=asked.min_tokens or 0,
            block_tokens=self.id_tokens,
            task="generate" if most else "prompt_logprobs",
            until=until,
            top=top,
            prompt_top=prompt_top,
            salt=(asked.cache_salt or "").encode(),
        )

    def one_shot(self, prompt: list[int], task: str) -> Generation:
        """A request for what a prompt comes to."""
        return ask(self.worker.number(), prompt, 0, block_tokens=self.id_tokens, task=task)

    def text_stream(self, asked: Generating) -> TextStream | None:
        """Makes text of tokens; None without a tokenizer.

        Raises:
            ApiError: 400: stop strings without a tokenizer.
        """
        if self.tokenizer is None:
            if asked.stops:
                raise bad_request("stop", "this server has no tokenizer to find strings with; stop_token_ids is served")
            return None
        skip, include = asked.skip_special_tokens is not False, bool(asked.include_stop_str_in_output)
        return TextStream(self.tokenizer, asked.stops, include, skip, asked.min_tokens or 0)

    def _ends(self, asked: Generating) -> frozenset[int]:
        own: frozenset[int] = frozenset() if asked.ignore_eos else self.end_tokens
        return own | frozenset(asked.stop_token_ids or ())

    def seed(self, asked: Generating) -> int:
        """The request's own seed, or one for it. Of several answers the i-th is drawn with seed + i."""
        return asked.seed if asked.seed is not None else self.seeds.getrandbits(63)


def _wish(asked: Generating, seed: int) -> Wish:
    return Wish(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_k=max(asked.top_k or 0, 0),
        top_p=1.0 if asked.top_p is None else asked.top_p,
        min_p=asked.min_p or 0.0,
        seed=seed & (2**64 - 1),
    )


_numbers = random.Random()  # seeded by the system; an id is no secret


def identifier(kind: str) -> str:
    """A new id of an answer."""
    return f"{kind}-{_numbers.getrandbits(128):032x}"


def now() -> int:
    """Seconds since 1970, as answers are dated."""
    return int(time.time())
