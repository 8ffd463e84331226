"""Makes the generations that the engine runs from a checked request."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kernels.sampling import SamplingParams
from live.generation import Generation, make_generation
from live.server.contracts import Contract
from live.server.errors import bad_request
from live.server.protocol import GenerationRequest
from live.server.served_model import ServedModel
from live.server.stop_conditions import StopConditions
from live.text.stop_strings import StopStrings
from live.text.stream import TextStream
from live.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationFactory:
    """Makes generations, with ids of their own.

    Attributes:
        seeds: random seeds for requests that give none.
    """

    model: ServedModel
    tokenizer: Tokenizer | None = None
    seeds: random.Random = field(default_factory=random.Random)
    request_ids: Iterator[int] = field(default_factory=itertools.count)

    def generate(
        self,
        request: GenerationRequest,
        prompt: list[int],
        max_tokens: int,
        seed: int,
        *,
        end_tokens: frozenset[int],
        stop_check: Callable[[int], bool] | None,
        logprobs: int,
        prompt_logprobs: int,
        contract: Contract,
    ) -> Generation:
        """One output of a request; the keyword arguments are as in `Generation`."""
        model = self._model(request)
        own_cache = b"" if model == self.model.base else b"\0" + model.encode()  # an adapter changes keys and values
        return make_generation(
            next(self.request_ids),
            prompt,
            max_tokens,
            sampling_params=_sampling_params(request, seed),
            end_tokens=end_tokens,
            min_tokens=request.min_tokens or 0,
            block_size=self.model.prefix_block_size,
            task="generate" if max_tokens else "prompt_logprobs",
            stop_check=stop_check,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cache_salt=(request.cache_salt or "").encode() + own_cache,
            model=model,
            **vars(contract),
        )

    def _model(self, request: GenerationRequest) -> str:
        """The model that a request is for, as the scheduler names it.

        Raises:
            ApiError: 400 if there are several models, none of which is the base of the others, and it names none.
        """
        if request.model is None and self.model.base:
            return self.model.base
        if not self.model.models:
            return "default"
        if request.model is None:
            raise bad_request("model", f"expected {' or '.join(self.model.models[:10])}")
        return request.model

    def pool(self, prompt: list[int], task: str, contract: Contract) -> Generation:
        """A pooling request, which produces no tokens; the base model computes it."""
        return make_generation(
            next(self.request_ids), prompt, 0, block_size=self.model.prefix_block_size, task=task,
            model=self.model.base or "default", **vars(contract),
        )  # fmt: skip

    def stop_conditions(self, request: GenerationRequest) -> StopConditions:
        """The stop strings and stop tokens of a request, built once for all of its outputs.

        Raises:
            ApiError: 400 for stop strings without a tokenizer.
        """
        if self.tokenizer is None and request.stop_strings:
            raise bad_request("stop", "this server has no tokenizer to find strings with; stop_token_ids is served")
        given = frozenset(request.stop_token_ids or ())
        own: frozenset[int] = frozenset() if request.ignore_eos else self.model.end_tokens
        strings = StopStrings(request.stop_strings) if request.stop_strings else None
        return StopConditions(strings, given, given | own)

    def text_stream(self, request: GenerationRequest, stops: StopStrings | None) -> TextStream | None:
        """The detokenizer of one output; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        skip, include = request.skip_special_tokens is not False, bool(request.include_stop_str_in_output)
        return TextStream(self.tokenizer, stops, include, skip, request.min_tokens or 0)

    def seed(self, request: GenerationRequest) -> int:
        """The request's seed, or a random one. The i-th of several outputs is sampled with seed + i."""
        return request.seed if request.seed is not None else self.seeds.getrandbits(63)


def _sampling_params(request: GenerationRequest, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(request.top_k or 0, 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        seed=seed & (2**64 - 1),
    )
