"""What clients may send. Unknown fields are ignored; known ones that are not served must be neutral."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import CoreSchema
from pydantic_core.core_schema import any_schema, no_info_after_validator_function

MOST_LOGPROBS = 20
"""Alternatives that a client may ask for at each token, as in vLLM."""


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 1.0 is as whole as 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(value: Any) -> Any:
    return (
        [_whole(each) for each in value] if isinstance(value, list) and any(type(v) is float for v in value) else value
    )


Count: TypeAlias = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Positive: TypeAlias = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Choices: TypeAlias = Annotated[int, Field(ge=1, le=128), BeforeValidator(_whole)]
TopK: TypeAlias = Annotated[int, Field(ge=-1, le=2**31 - 1), BeforeValidator(_whole)]
Seed: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), BeforeValidator(_whole)]
TokenIds: TypeAlias = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_all_whole), Field(min_length=1)]
Texts: TypeAlias = Annotated[list[str], Field(min_length=1)]
Prompts: TypeAlias = str | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1)]
"""One text or its token ids, or a batch of either."""

Stop: TypeAlias = Annotated[str, Field(min_length=1)]
Top: TypeAlias = Annotated[int, Field(ge=0, le=MOST_LOGPROBS), BeforeValidator(_whole)]


class Unserved:
    """Of a field that this server knows and does not serve: None, or one of these values, which ask for nothing."""

    def __init__(self, *neutral: Any) -> None:
        self.accepted = [None, *neutral]

    def check(self, value: Any) -> Any:
        """Refuse any other; true is not 1 here."""
        if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.accepted):
            return value
        choices = " or ".join("null" if each is None else repr(each) for each in self.accepted)
        raise ValueError(f"not served, expected {choices}")

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """How pydantic checks it."""
        return no_info_after_validator_function(self.check, any_schema())

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """How the OpenAPI document tells it."""
        return {"enum": self.accepted}


class Body(BaseModel):
    """Any request's body. The model's name may be left out: there is one."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk without choices that counts tokens."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class Generating(Body):
    """What completions and chats have in common."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: TopK | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Seed | None = None
    n: Choices | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    stop_token_ids: list[Count] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Top | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    frequency_penalty: Annotated[Any, Unserved(0)] = None
    presence_penalty: Annotated[Any, Unserved(0)] = None
    repetition_penalty: Annotated[Any, Unserved(1)] = None
    length_penalty: Annotated[Any, Unserved(1)] = None
    logit_bias: Annotated[Any, Unserved({})] = None
    best_of: Annotated[Any, Unserved(1)] = None
    use_beam_search: Annotated[Any, Unserved(False)] = None
    response_format: Annotated[Any, Unserved({"type": "text"})] = None
    guided_json: Annotated[Any, Unserved()] = None
    guided_regex: Annotated[Any, Unserved()] = None
    guided_choice: Annotated[Any, Unserved()] = None
    guided_grammar: Annotated[Any, Unserved()] = None
    structured_outputs: Annotated[Any, Unserved()] = None
    allowed_token_ids: Annotated[Any, Unserved()] = None
    bad_words: Annotated[Any, Unserved([])] = None
    truncate_prompt_tokens: Annotated[Any, Unserved()] = None
    priority: Annotated[Any, Unserved(0)] = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def counts_usage(self) -> bool:
        """Whether a stream ends with a count of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(Generating):
    """/v1/completions."""

    prompt: Prompts
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: Top | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[Any, Unserved("")] = None


class TextPart(BaseModel):
    """One part of a message's content. Only text is served."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a chat; fields beyond these reach the chat template too."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Templated(Body):
    """What a chat template is given."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Annotated[Any, Unserved(False)] = None
    chat_template: Annotated[Any, Unserved()] = None


class ChatRequest(Generating, Templated):
    """/v1/chat/completions."""

    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tool_choice: Annotated[Any, Unserved("none", "auto")] = None
    functions: Annotated[Any, Unserved([])] = None
    function_call: Annotated[Any, Unserved("none", "auto")] = None
    modalities: Annotated[Any, Unserved(["text"])] = None
    audio: Annotated[Any, Unserved()] = None


class EmbeddingRequest(Body):
    """/v1/embeddings and /pooling."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    truncate_prompt_tokens: Annotated[Any, Unserved()] = None


class ClassifyRequest(Body):
    """/classify."""

    input: Prompts


class ScoreRequest(Body):
    """/score: one text or several against as many, or one against all."""

    text_1: str | Texts
    text_2: str | Texts


class Document(BaseModel):
    """A text to be ranked, as some clients wrap it."""

    model_config = ConfigDict(strict=True)

    text: str


class RerankRequest(Body):
    """/rerank."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1)]
    top_n: Count | None = None


class TokenizeText(Body):
    """/tokenize of a text."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(Templated):
    """/tokenize of a chat."""

    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """/detokenize."""

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_all_whole)]
    skip_special_tokens: bool | None = None
