"""Request bodies, and the OpenAPI 3.1 document of the operations, generated from the types of their bodies.

Unknown fields are ignored; known fields that are not supported must have a neutral value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import CoreSchema
from pydantic_core.core_schema import any_schema, no_info_after_validator_function

from live.server.replies import ErrorReply

MAX_LOGPROBS = 20
"""Alternatives that a client may request for each token, as in vLLM."""

MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 1024
"""Number of stop strings, and characters of each: the event loop builds their tables, which takes milliseconds."""

MAX_STOP_TOKENS = 1024
"""Number of ids in `stop_token_ids`."""

MAX_IDS, MAX_BATCH, MAX_MESSAGES, MAX_TOOLS = 1 << 20, 1 << 14, 4096, 1024
"""Lengths of lists: token ids of one prompt, prompts, messages or their parts, tools or their calls. A longer list is
refused at its first element too many.
"""


MAX_CONTAINERS = 1 << 16
"""Lists and objects in a body. Python makes and collects a million of them in seconds, in which nothing else runs."""

_OTHER_BYTES = bytes(set(range(256)) - set(b'"[{'))


def has_too_many_containers(body: bytes) -> bool:
    """True if a JSON text opens more than `MAX_CONTAINERS` lists and objects, not counting brackets in strings."""
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return False
    marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHER_BYTES)
    outside = marks.split(b'"')[::2]
    return sum(map(len, outside)) > MAX_CONTAINERS


def _whole(value: Any) -> Any:
    """A float with an integer value as an integer: JSON has one number type."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(value: Any) -> Any:
    return [_whole(number) for number in value] if isinstance(value, list) and float in set(map(type, value)) else value


Count: TypeAlias = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Positive: TypeAlias = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
NumChoices: TypeAlias = Annotated[int, Field(ge=1, le=128), BeforeValidator(_whole)]
TopK: TypeAlias = Annotated[int, Field(ge=-1, le=2**31 - 1), BeforeValidator(_whole)]
Priority: TypeAlias = Annotated[int, Field(ge=-(2**31), le=2**31 - 1), BeforeValidator(_whole)]
Seed: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), BeforeValidator(_whole)]
Id: TypeAlias = Annotated[int, Field(ge=0)]
AnyIds: TypeAlias = Annotated[list[Id], Field(fail_fast=True, max_length=MAX_IDS), BeforeValidator(_all_whole)]
TokenIds: TypeAlias = Annotated[
    list[Id], Field(fail_fast=True, min_length=1, max_length=MAX_IDS), BeforeValidator(_all_whole)
]
Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_BATCH)]
Batch: TypeAlias = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_BATCH)]
Objects: TypeAlias = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)]


def _kind(value: Any) -> str | None:
    """The tag of `Prompts` that a value is checked as, by its first element."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return "texts" if isinstance(first, str) else "batch" if isinstance(first, list) else "ids"


Prompts: TypeAlias = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[Batch, Tag("batch")],
    Discriminator(
        _kind, custom_error_type="prompts", custom_error_message="expected a text, token ids, or a list of either"
    ),
]
"""One text or its token ids, or a batch of either. Only the kind that it begins as is tried: trying each of them on
megabytes of short strings takes minutes.
"""

Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
NumLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(_whole)]


class Unsupported:
    """The type of a field that is known but not supported: None, or one of these neutral values."""

    def __init__(self, *neutral: Any) -> None:
        self.accepted = [None, *neutral]

    def check(self, value: Any) -> Any:
        """Refuse any other value; true is not 1 here."""
        if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in self.accepted):
            return value
        choices = " or ".join("null" if neutral is None else repr(neutral) for neutral in self.accepted)
        raise ValueError(f"not served, expected {choices}")

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """pydantic's hook for validation."""
        return no_info_after_validator_function(self.check, any_schema())

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """pydantic's hook for the OpenAPI document."""
        return {"enum": self.accepted}


class Body(BaseModel):
    """Any request's body. The model's name is optional, since there is one model."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """Options of a stream. `include_usage`: a last chunk without choices counts tokens."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationRequest(Body):
    """The fields that completions and chat completions share."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: TopK | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Seed | None = None
    n: NumChoices | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    frequency_penalty: Annotated[Any, Unsupported(0)] = None
    presence_penalty: Annotated[Any, Unsupported(0)] = None
    repetition_penalty: Annotated[Any, Unsupported(1)] = None
    length_penalty: Annotated[Any, Unsupported(1)] = None
    logit_bias: Annotated[Any, Unsupported({})] = None
    best_of: Annotated[Any, Unsupported(1)] = None
    use_beam_search: Annotated[Any, Unsupported(False)] = None
    response_format: Annotated[Any, Unsupported({"type": "text"})] = None
    guided_json: Annotated[Any, Unsupported()] = None
    guided_regex: Annotated[Any, Unsupported()] = None
    guided_choice: Annotated[Any, Unsupported()] = None
    guided_grammar: Annotated[Any, Unsupported()] = None
    structured_outputs: Annotated[Any, Unsupported()] = None
    allowed_token_ids: Annotated[Any, Unsupported()] = None
    bad_words: Annotated[Any, Unsupported([])] = None
    truncate_prompt_tokens: Annotated[Any, Unsupported()] = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end an output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_logprobs(self) -> int:
        """Number of log-probabilities for each output token: -1 for none, 0 for the sampled token's only."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int:
        """The same for the prompt's tokens."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Prompts
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[Any, Unsupported("")] = None

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        requested = super().num_prompt_logprobs
        return max(requested, self.num_logprobs) if self.echo else requested  # an echoed prompt has the output's


class TextPart(BaseModel):
    """One part of a message's content. Only text is supported."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a chat. Further fields reach the chat template too."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tool_calls: Objects | None = None


class ChatTemplateRequest(Body):
    """The fields that a chat template uses."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    tools: Objects | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Annotated[Any, Unsupported(False)] = None
    chat_template: Annotated[Any, Unsupported()] = None


class ChatRequest(GenerationRequest, ChatTemplateRequest):
    """The body of /v1/chat/completions."""

    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tool_choice: Annotated[Any, Unsupported("none", "auto")] = None
    functions: Annotated[Any, Unsupported([])] = None
    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    audio: Annotated[Any, Unsupported()] = None

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1


class EmbeddingRequest(Body):
    """The body of /v1/embeddings and /pooling."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    truncate_prompt_tokens: Annotated[Any, Unsupported()] = None


class ClassifyRequest(Body):
    """The body of /classify."""

    input: Prompts


class ScoreRequest(Body):
    """The body of /score: as many texts in `text_1` as in `text_2`, or one text that is compared with all."""

    text_1: str | Texts
    text_2: str | Texts


class Document(BaseModel):
    """A text to be ranked, in the form that some clients send."""

    model_config = ConfigDict(strict=True)

    text: str


class RerankRequest(Body):
    """The body of /rerank."""

    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True, min_length=1, max_length=MAX_BATCH)]
    top_n: Count | None = None


class TokenizeText(Body):
    """The body of /tokenize, with a text."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatTemplateRequest):
    """The body of /tokenize, with a chat."""

    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    tokens: AnyIds
    skip_special_tokens: bool | None = None


ERRORS = {
    "400": "An invalid request; `param` is the field.",
    "401": "No API key, or a wrong one.",
    "404": "An unknown model.",
    "408": "A body that does not arrive in time.",
    "413": "A body that is too large.",
    "415": "A body that is not JSON.",
    "429": "Too many concurrent requests.",
    "500": "An internal error.",
    "503": "The queue is full, the server is shutting down, or the engine has failed.",
}
OF_GET = ("401", "500", "503")
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
"""One event of a stream: JSON of the same kind as the whole response, or [DONE] at the end."""


@dataclass(frozen=True)
class Operation:
    """One endpoint.

    Attributes:
        handler: called with the service, the body and the headers; its docstring is the operation's summary.
        response: type of the response, None for a page of text. body: type of the request's body, None for GET.
        requires_key: clients must send the API key. streams: the response may be server-sent events.
    """

    path: str
    handler: Callable[..., Any]
    response: TypeAdapter[Any] | None
    body: TypeAdapter[Any] | None = None
    requires_key: bool = True
    streams: bool = False

    @property
    def method(self) -> str:
        """GET without a body, else POST."""
        return "GET" if self.body is None else "POST"


def openapi_document(operations: Sequence[Operation], version: str, secured: bool) -> dict[str, Any]:
    """The document. `secured`: the server requires an API key."""
    adapters: list[Any] = [("error", "serialization", TypeAdapter(ErrorReply))]
    for i, operation in enumerate(operations):
        if operation.body is not None:
            adapters.append((i, "validation", operation.body))
        if operation.response is not None:
            adapters.append((i, "serialization", operation.response))
    schemas, definitions = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for i, operation in enumerate(operations):
        body, response = schemas.get((i, "validation")), schemas.get((i, "serialization"))
        entry = _entry(operation, body, response, schemas["error", "serialization"])
        if secured and operation.requires_key:
            entry["security"] = [{"key": []}]
        paths[operation.path] = {operation.method.lower(): entry}
    components: dict[str, Any] = {"schemas": definitions.get("$defs", {})}
    if secured:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "serving-twin", "version": version, "summary": "OpenAI-compatible serving of one model"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _entry(operation: Operation, body: Any, response: Any, error: Any) -> dict[str, Any]:
    page: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    content = page if response is None else _json(response)
    if operation.streams:
        content["text/event-stream"] = {"schema": EVENT}
    statuses = OF_GET if body is None else ERRORS
    errors = {status: {"description": ERRORS[status], "content": _json(error)} for status in statuses}
    summary = (operation.handler.__doc__ or "").strip()
    entry: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}{operation.path.replace('/', '_')}",
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}, **errors},
    }
    if body is not None:
        entry["requestBody"] = {"required": True, "content": _json(body)}
    return entry


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
