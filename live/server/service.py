"""The parts that the endpoints share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from live.backend import Backend
from live.device import versions
from live.server.async_engine import AsyncEngine
from live.server.errors import ApiError, bad_request, busy
from live.server.generation_factory import GenerationFactory
from live.server.identifiers import unix_time
from live.server.input_processor import InputProcessor, as_batch
from live.server.metrics import PrometheusExporter, ServerStats
from live.server.offload import Offload
from live.server.protocol import Prompts
from live.server.served_model import ServedModel
from live.server.server_config import ServerConfig
from live.text.chat import ChatTemplate
from live.text.tokenizer import Tokenizer


@dataclass
class Service:
    """One served model.

    Attributes:
        config: the server's settings. model: the model's name and sizes. async_engine: runs generations.
        inputs: makes prompts of requests. generations: makes generations of prompts.
        stats: counters. exporter: the metrics page. draining: new requests are refused.
        offload: encodes large requests in threads. started: seconds since 1970.
    """

    config: ServerConfig
    model: ServedModel
    async_engine: AsyncEngine
    inputs: InputProcessor
    generations: GenerationFactory
    stats: ServerStats
    exporter: PrometheusExporter
    draining: bool = False
    offload: Offload = field(default_factory=Offload)
    started: int = field(default_factory=unix_time)
    version: str = field(default_factory=lambda: versions().get("serving-twin", "unknown"))

    @classmethod
    def build(
        cls,
        config: ServerConfig,
        backend: Backend,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
    ) -> Self:
        """The service of a backend, which runs on the present event loop."""
        model, stats = ServedModel.of(config.name, backend, tokenizer), ServerStats(config.classes)
        return cls(
            config=config,
            model=model,
            async_engine=AsyncEngine(backend, stats),
            inputs=InputProcessor(model, tokenizer, template),
            generations=GenerationFactory(model, tokenizer),
            stats=stats,
            exporter=PrometheusExporter(stats, backend, model.name),
        )

    @property
    def backend(self) -> Backend:
        """The backend, to be looked at only: `async_engine` drives it."""
        return self.async_engine.backend

    def check_available(self, model: str | None) -> None:
        """Refuse a request for another model, or while the server cannot answer.

        Raises:
            ApiError: 404 or 503.
        """
        names = self.model.names
        if model is not None and model not in names:
            expected = " or ".join(names[:10])
            raise ApiError(404, f"model: expected {expected}, found {model}", param="model", code="model_not_found")
        if self.draining:
            raise busy(503, "the server is shutting down")
        if self.async_engine.failure is not None:
            raise self.async_engine.failure

    def check_capacity(self, generations: int) -> None:
        """Refuse a request whose generations do not fit into the queue.

        Raises:
            ApiError: 503, or 400 if they would not fit into an empty queue.
        """
        capacity = self.backend.limits.max_num_seqs + self.config.limits.queue
        if generations > capacity:
            raise bad_request(None, f"expected at most {capacity} prompts times n, found {generations}")
        present = len(self.async_engine.request_states)
        if present + generations > capacity:
            raise busy(503, f"the queue is full: {present} generations run or wait, at most {capacity}")

    def prompts(self, value: Prompts, field: str, special: bool = True, n: int = 1) -> list[list[int]]:
        """The token ids of one prompt or of several, encoded only if the queue has room for `n` outputs of each.

        Args:
            field, special: as in `InputProcessor.prompts`.

        Raises:
            ApiError: as `check_capacity` and `InputProcessor.prompts`.
        """
        self.check_capacity(len(as_batch(value)) * n)
        return self.inputs.prompts(value, field, special)
