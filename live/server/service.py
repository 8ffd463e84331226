"""One served model: its prompts, and its generations on the backend.

A `RequestState` finishes exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kernels.sampling import SamplingParams
from live.backend import Backend
from live.device import versions
from live.engine import Progress
from live.generation import Contract, make_generation
from live.server.input_processor import ChatTemplate, InputProcessor, as_batch
from live.server.metrics import FinishedReason, PrometheusExporter, ServerStats
from live.server.options import ServerConfig
from live.server.protocol import GenerationRequest, Prompts
from live.server.replies import ApiError, bad_request, busy
from live.server.request_state import RequestState, StopStrings, TextStream
from live.tokenizer import Tokenizer
from schedulers.admission_control import RequestShed

WRITE_SHARE = 0.25
WRITE_SECONDS = 7e-6
MIN_WRITES = 16
"""Share of the time between two deliveries of tokens in which streams are written, seconds for each stream with a new
token, whichever is less, and streams written in any case."""

MAX_TENANT = 128
"""Characters of a tenant's name."""


class Service:
    """One served model, or one with its adapters, on a backend that the running event loop drives.

    Attributes:
        config: the server's settings. backend: an engine or a topology. inputs: makes prompts of requests.
        base: the model whose adapters the others are; "" where there are none. names: those that clients may use.
        labels: names of the classes of a classification model, empty for others.
        end_tokens: ids that end an output, of the model's config and its tokenizer.
        request_states: of unfinished generations, by request id.
        stats: counters. exporter: the metrics page. draining: new requests are refused.
        failure: why the backend has failed; None while it runs. on_failure: called when it fails.
        started: seconds since 1970.
    """

    def __init__(
        self,
        config: ServerConfig,
        backend: Backend,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.inputs = InputProcessor(backend, tokenizer, template)
        self.base = config.name if config.name in backend.models else ""
        self.names = backend.models or (config.name,)
        self.labels = backend.config.labels
        of_tokenizer = tokenizer.end_tokens if tokenizer is not None else frozenset()
        self.end_tokens = frozenset(backend.config.end_tokens) | of_tokenizer
        self.request_states: dict[int, RequestState] = {}
        self.stats = ServerStats(config.classes)
        self.exporter = PrometheusExporter(self.stats, backend, config.name)
        self.draining = False
        self.failure: ApiError | None = None
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.started = int(time.time())
        self.version = versions().get("serving-twin", "unknown")
        self._unwritten: dict[RequestState, None] = {}  # streams with new tokens, the longest waiting first
        self._delivered = time.perf_counter()
        self._seeds = random.Random()
        self._request_ids = itertools.count()
        backend.start(self._deliver, self._fail)

    # -- checks, which may also run in a thread ----------------------------------------------------------------------

    def check_available(self, model: str | None) -> None:
        """Refuse a request for another model, or while the server cannot answer."""
        if model is not None and model not in self.names:
            expected = " or ".join(self.names[:10])
            raise ApiError(404, f"model: expected {expected}, found {model}", param="model", code="model_not_found")
        if self.draining:
            raise busy(503, "the server is shutting down")
        if self.failure is not None:
            raise self.failure

    def check_capacity(self, generations: int) -> None:
        """Refuse a request whose generations do not fit into the queue: by 503, or 400 if they never will."""
        capacity = self.backend.limits.max_num_seqs + self.config.options.max_queue
        if generations > capacity:
            raise bad_request(None, f"expected at most {capacity} prompts times n, found {generations}")
        present = len(self.request_states)
        if present + generations > capacity:
            raise busy(503, f"the queue is full: {present} generations run or wait, at most {capacity}")

    def prompts(self, value: Prompts, field: str, special: bool = True, n: int = 1) -> list[list[int]]:
        """Prompts as from `InputProcessor.prompts`, if the queue has room for `n` outputs of each."""
        self.check_capacity(len(as_batch(value)) * n)
        return self.inputs.prompts(value, field, special)

    # -- requests, made in the same thread as their checks -----------------------------------------------------------

    def _contract(self, headers: Mapping[str, str], priority: int | None = None) -> Contract:
        """The tenant and the class that a request's headers name, with what the class promises.

        `priority`: of the body, which goes before that of the class. Without classes in the configuration, the header
        of the class is ignored. Raises an `ApiError` for an unknown class, and for a long name of a tenant.
        """
        arrival, classes = time.perf_counter(), self.config.classes
        tenant, name = headers.get("x-tenant", ""), headers.get("x-request-class", "")
        if len(tenant) > MAX_TENANT:
            raise bad_request(None, f"header X-Tenant: expected at most {MAX_TENANT} characters, found {len(tenant)}")
        if name and classes and name not in classes:
            expected = f"expected one of {', '.join(classes)}"
            raise bad_request(None, f"header X-Request-Class: {expected}, found {name[:MAX_TENANT]}")
        service_class = classes.get(name)
        if service_class is None:
            return Contract(arrival, priority or 0, tenant)
        priority = service_class.priority if priority is None else priority
        return Contract(arrival, priority, tenant, name, service_class.ttft_goal)

    def generations(
        self, request: GenerationRequest, prompts: list[list[int]], max_tokens: int, headers: Mapping[str, str]
    ) -> list[RequestState]:
        """The outputs of a request, `n` for each prompt.

        Raises an `ApiError` as `_contract`; for stop strings without a tokenizer; or if there are several models, none
        of which is the base of the others, and the request names none.
        """
        contract = self._contract(headers, request.priority)
        tokenizer = self.inputs.tokenizer
        if tokenizer is None and request.stop_strings:
            raise bad_request("stop", "this server has no tokenizer to find strings with; stop_token_ids is served")
        stops = StopStrings(request.stop_strings) if request.stop_strings else None
        stop_token_ids, min_tokens = request.stop_token_ids or (), request.min_tokens or 0
        end_tokens = frozenset(stop_token_ids) | (frozenset() if request.ignore_eos else self.end_tokens)
        seed = self._seeds.getrandbits(63) if request.seed is None else request.seed
        model = self._model(request)
        own_cache = b"" if model == self.base else b"\0" + model.encode()  # an adapter changes keys and values
        salt, changed = (request.cache_salt or "").encode() + own_cache, asyncio.Event()
        states: list[RequestState] = []
        for prompt, i in itertools.product(prompts, range(request.n or 1)):
            generation = make_generation(
                next(self._request_ids),
                prompt,
                max_tokens,
                sampling_params=_sampling_params(request, (seed + i) & (2**64 - 1)),
                end_tokens=end_tokens,
                min_tokens=min_tokens,
                block_size=self.backend.limits.prefix_id_tokens,
                task="generate" if max_tokens else "prompt_logprobs",
                logprobs=request.num_logprobs,
                prompt_logprobs=request.num_prompt_logprobs,
                cache_salt=salt,
                model=model,
                contract=contract,
            )
            state = RequestState(generation, changed, len(states), stop_token_ids)
            if tokenizer is not None:
                state.stream = TextStream(
                    tokenizer, stops, min_tokens=min_tokens,
                    include_stop_str_in_output=bool(request.include_stop_str_in_output),
                    skip_special_tokens=request.skip_special_tokens is not False,
                )  # fmt: skip
                generation.stop_check = None if stops is None else state.stops_at
            states.append(state)
        return states

    def poolings(self, prompts: list[list[int]], task: str, headers: Mapping[str, str]) -> list[RequestState]:
        """Pooling requests, which produce no tokens; the base model computes them. Raises as `_contract`."""
        contract, changed = self._contract(headers), asyncio.Event()
        states = []
        for i, prompt in enumerate(prompts):
            generation = make_generation(
                next(self._request_ids), prompt, 0, block_size=self.backend.limits.prefix_id_tokens, task=task,
                model=self.base or "default", contract=contract,
            )  # fmt: skip
            states.append(RequestState(generation, changed, i))
        return states

    def _model(self, request: GenerationRequest) -> str:
        """The model that a request is for, as the scheduler names it."""
        if request.model is None and self.base:
            return self.base
        if not self.backend.models:
            return "default"
        if request.model is None:
            raise bad_request("model", f"expected {' or '.join(self.names[:10])}")
        return request.model

    # -- on the event loop -------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, states: Sequence[RequestState]) -> Iterator[None]:
        """Submit the generations of a request; abort those that are unfinished at the end of the `with` block.

        Raises an `ApiError` as `check_capacity`; 400 for one that the engine refuses; 429 or 503 for one that it sheds,
        by a limit of its tenant or by another one; 503 if the engine has failed.
        """
        self.check_capacity(len(states))  # others may have come while these were being made
        try:
            for state in states:
                self._submit(state)
            yield
        finally:
            for state in states:
                if state.generation.request.id in self.request_states:
                    self._abort(state, "abort")

    async def changed(self, states: Sequence[RequestState]) -> None:
        """Wait until `changed` of a request's generations has been set since the last call."""
        changed = states[0].changed
        await changed.wait()
        changed.clear()
        for state in states:
            if state.error is not None:
                raise state.error

    def fail_all(self, error: ApiError) -> None:
        for state in list(self.request_states.values()):
            state.error = error
            self._abort(state, "error")

    def _abort(self, state: RequestState, reason: FinishedReason) -> None:
        self._finish(state, reason)
        if self.failure is None:
            self.backend.abort(state.generation.request.id)

    def _submit(self, state: RequestState) -> None:
        if self.failure is not None:
            raise self.failure
        request = state.generation.request
        try:
            self.backend.submit(state.generation)
        except RequestShed as shed:
            self.stats.classes[request.service_class].shed[shed.reason] += 1
            message = f"the engine is overloaded ({shed.reason.replace('_', ' ')}); expected a retry later"
            raise busy(429 if shed.reason == "tenant_waiting" else 503, message, shed.retry_after) from None
        except ValueError as error:
            raise bad_request(None, str(error)) from None
        self.request_states[request.id] = state

    def _fail(self, reason: str) -> None:
        """Note that the backend has failed, and end all generations with an error."""
        self.failure = ApiError(503, reason, code="engine_failed")
        self.fail_all(self.failure)
        self.on_failure(reason)

    def _deliver(self, progress: Progress) -> None:
        """Count new tokens and finished generations, and wake their responses."""
        now = time.perf_counter()
        states = self.request_states
        advanced = [state for each in progress.advanced if (state := states.get(each.request.id)) is not None]
        for state in advanced:  # the others have been aborted meanwhile
            self._record_tokens(state, now)
        for generation in progress.finished:
            state = self.request_states.get(generation.request.id)
            if state is not None:
                state.last_token_time = now
                self._finish(state, "length" if generation.finish_reason == "length" else "stop")
        self._unwritten.update(
            (state, None) for state in advanced if not state.finished and state.on_tokens is not None
        )
        self._write_streams(now, len(advanced))

    def _write_streams(self, now: float, streams: int) -> None:
        """Write to streams that have new tokens, the longest waiting first, as long as that may take.

        A write takes the event loop some 10 µs, half of them in the system, which steps the engine in the same thread:
        with many streams and short steps, writing all of them each time would take longer than the steps.
        """
        end = now + min(WRITE_SHARE * (now - self._delivered), WRITE_SECONDS * streams)
        writes = 0
        while self._unwritten and (writes < MIN_WRITES or time.perf_counter() < end):
            state = next(iter(self._unwritten))
            del self._unwritten[state]
            if state.on_tokens is not None:
                state.on_tokens()
            writes += 1
        self._delivered = time.perf_counter()

    def _record_tokens(self, state: RequestState, now: float) -> None:
        request, tokens = state.generation.request, len(state.generation.output)
        first = state.first_token_time < 0
        seconds = now - (request.arrival if first else state.last_token_time)
        self.stats.record_tokens(request.service_class, tokens - state.num_recorded, seconds, first=first)
        if first:
            state.first_token_time = now
            state.changed.set()
        state.last_token_time = now
        state.num_recorded = tokens

    def _finish(self, state: RequestState, reason: FinishedReason) -> None:
        assert not state.finished
        self._unwritten.pop(state, None)
        generation = state.generation
        del self.request_states[generation.request.id]
        state.finished = True
        self.stats.reasons[reason] += 1
        if reason in ("stop", "length"):
            end, request = state.last_token_time, generation.request
            tokens = len(generation.output)
            self.stats.record_finished(request, tokens, end - request.arrival, end - state.first_token_time)
        state.changed.set()


def _sampling_params(request: GenerationRequest, seed: int) -> SamplingParams:
    """The sampling parameters of one output of a request."""
    return SamplingParams(
        1.0 if request.temperature is None else request.temperature, max(request.top_k or 0, 0),
        1.0 if request.top_p is None else request.top_p, request.min_p or 0.0, seed,
    )  # fmt: skip
