"""Turns the input of a request into prompt token ids: tokenizer, chat template, and checks of ids and lengths."""

from __future__ import annotations

from collections.abc import Sequence

from live.backend import Backend
from live.server.errors import bad_request
from live.server.protocol import ChatTemplateRequest, Prompts
from live.text.chat import ChatTemplate
from live.text.tokenizer import Tokenizer
from workloads.errors import BadInput


def as_batch(value: Prompts) -> Sequence[str | list[int]]:
    """The prompts of a field that holds one or several."""
    return [value] if isinstance(value, str) or isinstance(value[0], int) else value


class InputProcessor:
    """Turns texts, chats and token ids into prompts that the model can run.

    Attributes:
        tokenizer: None if the server takes and returns token ids only. template: None without a chat template.
        vocab_size: token ids that the model accepts.
        max_model_len: tokens of a prompt and its output together: the model's context, or the KV cache if smaller.
    """

    def __init__(self, backend: Backend, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.vocab_size = backend.config.shape.vocabulary
        self.max_model_len = backend.limits.max_model_len

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ApiError: 400 without one.
        """
        if self.tokenizer is None:
            raise bad_request(None, "this server has no tokenizer: it takes token ids and gives token ids")
        return self.tokenizer

    def prompts(self, value: Prompts, field: str, special: bool = True) -> list[list[int]]:
        """The token ids of one prompt or of several.

        Args:
            field: the request's field, for errors. special: add the tokenizer's special tokens to texts.

        Raises:
            ApiError: 400 for a prompt that is empty, too long, or has ids that the model does not know.
        """
        return [
            self.check_prompt(self.encode(prompt, field, special) if isinstance(prompt, str) else prompt, field)
            for prompt in as_batch(value)
        ]

    def encode(self, text: str, field: str, special: bool = True) -> list[int]:
        """The token ids of a text.

        Raises:
            ApiError: 400 for lone surrogates, which are not text, and without a tokenizer.
        """
        tokenizer = self.require_tokenizer()
        try:
            return tokenizer.encode(text, special)
        except BadInput as error:
            raise bad_request(field, error.expected) from None

    def chat(self, request: ChatTemplateRequest) -> list[int]:
        """The token ids of a chat.

        Raises:
            ApiError: 400 without a tokenizer or a template, or for messages that the template refuses.
        """
        self.require_tokenizer()
        if self.template is None:
            raise bad_request("messages", "this model has no chat template")
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        start = request.add_generation_prompt is not False
        try:
            text = self.template.render(
                messages, tools=request.tools, add_generation_prompt=start, **(request.chat_template_kwargs or {})
            )
        except BadInput as error:
            raise bad_request("messages", error.expected) from None
        except TypeError:  # a keyword argument that is given twice
            raise bad_request("chat_template_kwargs", "expected no names that the request has fields for") from None
        return self.check_prompt(self.encode(text, "messages", special=False), "messages")

    def check_prompt(self, ids: list[int], field: str) -> list[int]:
        """The same ids, if the model can run them.

        Raises:
            ApiError: 400.
        """
        if not ids:
            raise bad_request(field, "expected a prompt of at least 1 token, found none")
        if max(ids) >= self.vocab_size:
            raise bad_request(field, f"expected token ids below {self.vocab_size}, found {max(ids)}")
        self.check_length(ids, 0, field)
        return ids

    def check_length(self, prompt: list[int], max_tokens: int, field: str) -> int:
        """`max_tokens`, if that many output tokens fit behind the prompt.

        Raises:
            ApiError: 400.
        """
        if len(prompt) + max_tokens > self.max_model_len:
            expected = f"expected at most {self.max_model_len} tokens"
            message = f"{expected}, found {len(prompt)} of the prompt and {max_tokens} of the output"
            raise bad_request(field, message, "context_length_exceeded")
        return max_tokens

    def token_text(self, token: int) -> str:
        """A token as text, or as "token_id:N" without a tokenizer."""
        return f"token_id:{token}" if self.tokenizer is None else self.tokenizer.token_text(token)
