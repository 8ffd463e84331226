"""The model behind the endpoints: its name and the sizes that limit requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from live.backend import Backend
from live.server.errors import bad_request
from live.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """The served model.

    Attributes:
        name: the model's name for clients. models: the names of several models, one of which a request must name; empty
            where there is one. labels: names of the classes of a classification model, empty for others.
        hidden_size: of its hidden states. vocab_size: token ids that it accepts.
        max_model_len: tokens of a prompt and its output together: the model's context, or the KV cache if smaller.
        end_tokens: ids that end an output, of the model's config and its tokenizer.
        prefix_block_size: prompt tokens that one prefix id stands for.
    """

    name: str
    labels: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    max_model_len: int
    end_tokens: frozenset[int]
    prefix_block_size: int
    models: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """The model whose adapters the others are; "" where there are none."""
        return self.name if self.name in self.models else ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients may use."""
        return self.models or (self.name,)

    @classmethod
    def of(cls, name: str, backend: Backend, tokenizer: Tokenizer | None) -> Self:
        """The model of a backend."""
        config, limits = backend.config, backend.limits
        of_tokenizer = tokenizer.end_tokens if tokenizer is not None else frozenset()
        return cls(
            name=name,
            labels=config.labels,
            hidden_size=config.shape.hidden,
            vocab_size=config.shape.vocabulary,
            max_model_len=limits.max_model_len,
            end_tokens=frozenset([*config.end_tokens, *(each for each in of_tokenizer if each is not None)]),
            prefix_block_size=limits.prefix_id_tokens,
            models=backend.models,
        )

    def check_generates(self) -> None:
        """Refuse to generate tokens with a classification model.

        Raises:
            ApiError: 400.
        """
        if self.labels:
            message = f"{self.name} is a classification model and generates no tokens: see /classify, /score, /rerank"
            raise bad_request("model", message)
