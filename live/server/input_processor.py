"""Prompts of texts, token ids and chats, which Hugging Face's chat templates turn into the text of the training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from live.backend import Backend
from live.server.protocol import ChatTemplateRequest, Prompts
from live.server.replies import bad_request
from live.tokenizer import SETTINGS, Tokenizer, read_object, read_text, special_tokens
from workloads.errors import BadInput

Message: TypeAlias = Mapping[str, Any]

FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
DEFAULT, TOOLS = "default", "tool_use"


class ChatTemplate:
    """The chat templates of a directory by name ("default", "tool_use"), with texts of special tokens.

    A template is code that comes with a model, so it runs in Jinja's sandbox.
    """

    def __init__(self, templates: Mapping[str, Template], tokens: Mapping[str, str]) -> None:
        self.templates = templates
        self.tokens = tokens

    @classmethod
    def read(cls, directory: Path) -> ChatTemplate | None:
        """Read chat_template.jinja, or else `chat_template` of tokenizer_config.json; None if neither exists."""
        environment = _environment()
        templates = {}
        for name, (source, file) in _sources(directory).items():
            try:
                templates[name] = template = environment.from_string(source)
            except TemplateError as error:
                raise BadInput(f"expected a Jinja template ({error})", field="chat_template", file=file) from None
            template.globals = {**template.globals}  # Jinja's own is a ChainMap, copied at every rendering in 9 µs
        return cls(templates, special_tokens(directory)) if templates else None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The text of a conversation of `ChatMessage`s, including special tokens."""
        plain = [_plain(message) for message in messages]
        variables = {**self.tokens, **extra, "messages": plain, "tools": list(tools) if tools else None}
        template = self._template(bool(tools))
        try:
            return template.render(**variables, add_generation_prompt=add_generation_prompt)
        except RecursionError:
            raise BadInput("expected messages that are nested less deeply", field="messages") from None
        except Exception as error:  # a template can raise any exception
            raise BadInput(f"expected messages that the chat template accepts ({error})", field="messages") from None

    def _template(self, with_tools: bool) -> Template:
        template = (with_tools and self.templates.get(TOOLS)) or self.templates.get(DEFAULT)
        if not template:
            names = ", ".join(self.templates)
            raise BadInput(f"expected a chat template named {DEFAULT}, found {names}", field="chat_template")
        return template


def _sources(directory: Path) -> dict[str, tuple[str, Path]]:
    if (directory / FILE).exists():
        files = {DEFAULT: directory / FILE}
        files |= {file.stem: file for file in sorted((directory / FOLDER).glob("*.jinja"))}
        return {name: (read_text(file), file) for name, file in files.items()}
    file = directory / SETTINGS
    value = read_object(file).get("chat_template")
    if value is None:
        return {}
    try:
        sources = {DEFAULT: value} if isinstance(value, str) else {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        sources = {"": None}
    if not all(isinstance(part, str) for pair in sources.items() for part in pair):
        raise BadInput("expected text, or a list of objects with name and template", field="chat_template", file=file)
    return {name: (source, file) for name, source in sources.items()}


def _plain(message: Message) -> dict[str, Any]:
    """A message in the form that templates expect: content as a string, arguments of tool calls as objects."""
    content, calls = message.get("content"), message.get("tool_calls")
    text = content or "" if not isinstance(content, list) else "\n".join(part["text"] for part in content)
    return {**message, "content": text, **({"tool_calls": [*map(_with_arguments, calls)]} if calls else {})}


def _with_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object, which templates print as JSON; clients send them as JSON in a
    string.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except RecursionError:
        raise BadInput("expected arguments of tool calls that are nested less deeply") from None
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} marks training targets; rendering keeps only what is inside."""

    tags = {"generation"}  # noqa: RUF012, Jinja declares it as an attribute of instances

    def parse(self, parser: Parser) -> nodes.Node:
        """Jinja's hook for extensions."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    @staticmethod
    def _inside(caller: Macro) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja with the filters, functions and extensions that transformers gives to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON (`options`: indent, separators, sort_keys) without escapes for HTML, which Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def as_batch(value: Prompts) -> Sequence[str | list[int]]:
    """The prompts of a field that holds one or several."""
    return [value] if isinstance(value, str) or isinstance(value[0], int) else value


class InputProcessor:
    """Turns texts, chats and token ids into prompts; what the model cannot run raises an `ApiError` of status 400.

    Attributes:
        tokenizer: None if the server takes and returns token ids only. template: None without a chat template.
        vocab_size: token ids that the model accepts.
        max_model_len: tokens of a prompt and its output together: the model's context, or the KV cache if smaller.
    """

    def __init__(self, backend: Backend, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.vocab_size = backend.config.shape.vocabulary
        self.max_model_len = backend.limits.max_model_len

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise bad_request(None, "this server has no tokenizer: it takes token ids and gives token ids")
        return self.tokenizer

    def prompts(self, value: Prompts, field: str, special: bool = True) -> list[list[int]]:
        """The token ids of one prompt or of several.

        Args:
            field: the request's field, for errors. special: add the tokenizer's special tokens to texts.
        """
        return [
            self.check_prompt(self.encode(prompt, field, special) if isinstance(prompt, str) else prompt, field)
            for prompt in as_batch(value)
        ]

    def encode(self, text: str, field: str, special: bool = True) -> list[int]:
        """The token ids of a text."""
        tokenizer = self.require_tokenizer()
        try:
            return tokenizer.encode(text, special)
        except BadInput as error:
            raise bad_request(field, error.expected) from None

    def chat(self, request: ChatTemplateRequest) -> list[int]:
        """The token ids of a chat."""
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
        """The same ids, if the model can run them."""
        if not ids:
            raise bad_request(field, "expected a prompt of at least 1 token, found none")
        if max(ids) >= self.vocab_size:
            raise bad_request(field, f"expected token ids below {self.vocab_size}, found {max(ids)}")
        self.check_length(ids, 0, field)
        return ids

    def check_length(self, prompt: list[int], max_tokens: int, field: str) -> int:
        """`max_tokens`, if that many output tokens fit behind the prompt."""
        if len(prompt) + max_tokens > self.max_model_len:
            expected = f"expected at most {self.max_model_len} tokens"
            message = f"{expected}, found {len(prompt)} of the prompt and {max_tokens} of the output"
            raise bad_request(field, message, "context_length_exceeded")
        return max_tokens

    def token_text(self, token: int) -> str:
        """A token as text, or as "token_id:N" without a tokenizer."""
        return f"token_id:{token}" if self.tokenizer is None else self.tokenizer.token_text(token)
