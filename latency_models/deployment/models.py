"""Model files: the shapes that determine KV-cache bytes and FLOPs, and the formats of weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr, model_validator

from latency_models.io.builtin_files import FORMAT, find_data
from latency_models.io.config_io import Strict, checked, read_yaml
from workloads.errors import BadInput

Weights: TypeAlias = Literal["bf16", "fp8", "int8", "fp4", "mxfp4"]

WEIGHT_BYTES: dict[Weights, float] = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625, "mxfp4": 0.53125}
"""Bytes of one weight. Of the 4-bit formats, NVFP4 has an 8-bit scale for 16 weights and MXFP4 one for 32."""


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of the linear layers (projections, dense FFNs, shared experts) and of the routed experts."""

    linear: Weights
    experts: Weights

    def __str__(self) -> str:
        return self.linear if self.linear == self.experts else f"{self.linear}, experts in {self.experts}"


class GroupedQueryAttention(Strict):
    """Grouped queries (GQA; MHA has as many KV heads as heads).

    Attributes:
        qk_norm: queries and keys are normed head by head.
        window, windowed_layers: most tokens that a query attends to, in this many layers. The step-time
            source roofline and its memory know of windows; AFD rooflines count every layer as one of full attention.
    """

    kind: Literal["gqa"]
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    qk_norm: bool = False
    window: NonNegativeInt = 0
    windowed_layers: NonNegativeInt = 0

    @model_validator(mode="after")
    def _whole_groups(self) -> GroupedQueryAttention:
        if self.heads % self.kv_heads:
            raise BadInput(f"expected a divisor of heads ({self.heads})", field="kv_heads", value=self.kv_heads)
        if (self.window > 0) != (self.windowed_layers > 0):
            expected = "expected both or neither of window and windowed_layers"
            raise BadInput(expected, field="windowed_layers", value=self.windowed_layers)
        return self

    @property
    def cached_elements(self) -> int:
        """Elements that one token adds to the KV cache of one layer: keys and values of every KV head."""
        return 2 * self.kv_heads * self.head_dim

    def projection_weights(self, hidden: int) -> int:
        """Weights of the query, key, value and output projections of one layer."""
        return hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def norm_weights(self) -> int:
        """Weights of the normalisations inside the attention of one layer."""
        return 2 * self.head_dim if self.qk_norm else 0


class LatentAttention(Strict):
    """Latent attention (MLA): keys and values are cached as one compressed vector and one rotary key (AFD B.1)."""

    kind: Literal["mla"]
    heads: PositiveInt
    kv_compressed: PositiveInt
    rope_dim: PositiveInt
    q_compressed: PositiveInt
    nope_dim: PositiveInt
    value_dim: PositiveInt

    @property
    def cached_elements(self) -> int:
        """The elements d_c + d_rope that a token adds to the KV cache of one layer (eq. 24)."""
        return self.kv_compressed + self.rope_dim

    def projection_weights(self, hidden: int) -> int:
        """Weights of the down- and up-projections of queries, keys and values, and of the output, of one layer."""
        query = self.q_compressed * (hidden + self.heads * (self.nope_dim + self.rope_dim))
        key_value = hidden * self.cached_elements + self.kv_compressed * self.heads * (self.nope_dim + self.value_dim)
        return query + key_value + self.heads * self.value_dim * hidden

    @property
    def norm_weights(self) -> int:
        """Weights of the normalisations of the compressed queries, and keys and values, of one layer."""
        return self.q_compressed + self.kv_compressed


class DenseFFN(Strict):
    """A dense FFN: SwiGLU with three matrices."""

    kind: Literal["dense"]
    intermediate_size: PositiveInt

    def weights(self, hidden: int) -> int:
        """Weights of one layer."""
        return 3 * hidden * self.intermediate_size

    def row_flops(self, hidden: int) -> int:
        """FLOPs of one row: 6·H·I."""
        return 6 * hidden * self.intermediate_size


class ExpertFFN(Strict):
    """Mixture of experts, each SwiGLU; the first `dense_layers` layers are dense."""

    kind: Literal["moe"]
    intermediate_size: PositiveInt
    experts: PositiveInt
    experts_per_token: PositiveInt
    shared_experts: NonNegativeInt = 0
    router_bias: bool = False
    dense_layers: NonNegativeInt = 0
    dense_intermediate_size: NonNegativeInt = 0

    @model_validator(mode="after")
    def _agrees(self) -> ExpertFFN:
        if self.experts_per_token > self.experts:
            expected = f"expected at most the experts there are ({self.experts})"
            raise BadInput(expected, field="experts_per_token", value=self.experts_per_token)
        if self.dense_layers and not self.dense_intermediate_size:
            raise BadInput("expected a size, since dense_layers is not 0", field="dense_intermediate_size", value=0)
        return self

    def expert_weights(self, hidden: int) -> int:
        """Weights of one expert."""
        return 3 * hidden * self.intermediate_size

    def row_flops(self, hidden: int) -> int:
        """FLOPs of one row in one expert: 6·H·d_expert (eq. 27)."""
        return 6 * hidden * self.intermediate_size

    def weights(self, hidden: int) -> int:
        """Weights of one MoE layer: every expert, routed and shared, and the router."""
        router = self.experts * (hidden + (1 if self.router_bias else 0))
        return (self.experts + self.shared_experts) * self.expert_weights(hidden) + router


class Checkpoint(Strict):
    """Published weights.

    Attributes:
        repository: on Hugging Face; None for weights that are nowhere.
        weights: format of linear layers. experts: of routed experts; None: that of `weights`.
        bytes: of its safetensors, with what model files leave out: scales, biases, MTP modules.
    """

    repository: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    weights: Weights = "bf16"
    experts: Weights | None = None
    bytes: PositiveInt | None = None

    @property
    def formats(self) -> Formats:
        """The formats of its weights."""
        return Formats(self.weights, self.experts or self.weights)


AS_PUBLISHED = Checkpoint()
"""The weights of a model file that states none."""


class Model(Strict):
    """One transformer.

    Attributes:
        checkpoints: its weights as published. The first is the one that is meant where no format is stated.
    """

    schema_: Literal["twin.model/1"] = Field(alias="schema")
    name: Annotated[str, Field(min_length=1)]
    hidden_size: PositiveInt
    layers: PositiveInt
    vocabulary: PositiveInt
    tied_embeddings: bool
    attention: Annotated[GroupedQueryAttention | LatentAttention, Field(discriminator="kind")]
    ffn: Annotated[DenseFFN | ExpertFFN, Field(discriminator="kind")]
    mtp_depth: NonNegativeInt = 0
    published_parameters: PositiveFloat | None = None
    checkpoints: list[Checkpoint] = Field(default_factory=list)
    source: str
    _unknown_format: BadInput | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _layers_agree(self) -> Model:
        if self._dense_layers > self.layers:
            expected = f"expected at most the layers there are ({self.layers})"
            raise BadInput(expected, field="ffn.dense_layers", value=self._dense_layers)
        if self.windowed_layers > self.layers:
            expected = f"expected at most the layers there are ({self.layers})"
            raise BadInput(expected, field="attention.windowed_layers", value=self.windowed_layers)
        return self

    @property
    def windowed_layers(self) -> int:
        """Layers whose attention has a window."""
        return self.attention.windowed_layers if isinstance(self.attention, GroupedQueryAttention) else 0

    @property
    def embedding_parameters(self) -> int:
        """Weights of the token embedding and, where it is not the same matrix, the output head."""
        return self.vocabulary * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """All weights, without MTP modules. Biases of projections are ignored; these models have none."""
        hidden, attention = self.hidden_size, self.attention
        layer = attention.projection_weights(hidden) + attention.norm_weights + 2 * hidden
        return self.embedding_parameters + self.layers * layer + self._ffn_parameters + hidden

    @property
    def _dense_layers(self) -> int:
        return self.ffn.dense_layers if isinstance(self.ffn, ExpertFFN) else 0

    @property
    def _ffn_parameters(self) -> int:
        ffn, hidden = self.ffn, self.hidden_size
        dense = 3 * hidden * ffn.dense_intermediate_size if isinstance(ffn, ExpertFFN) else 0
        return (self.layers - self._dense_layers) * ffn.weights(hidden) + self._dense_layers * dense

    @property
    def published_formats(self) -> Formats | None:
        """The formats of the first checkpoint; None where they are not known here."""
        return None if self._unknown_format is not None else (self.checkpoints or [AS_PUBLISHED])[0].formats

    def formats(self, weights: Weights | None = None, experts: Weights | None = None) -> Formats:
        """The formats that are stated, and those of the first checkpoint for what is not.

        `experts` is `weights` where only these are stated. MXFP4 is a format of experts alone: stated for the weights
        of a mixture of experts, its linear layers are in bf16.
        """
        if weights is None:
            published = self.published_formats
            if published is None:
                assert self._unknown_format is not None
                raise self._unknown_format
            return Formats(published.linear, experts or published.experts)
        linear = "bf16" if weights == "mxfp4" and isinstance(self.ffn, ExpertFFN) else weights
        return Formats(linear, experts or weights)

    def checkpoint(self, formats: Formats) -> Checkpoint | None:
        """The first published weights of these formats."""
        sparse = isinstance(self.ffn, ExpertFFN)
        for published in self.checkpoints:
            same = published.formats == formats if sparse else published.weights == formats.linear
            if same and published.repository is not None:
                return published
        return None

    def weight_bytes(self, formats: Formats) -> float:
        """Bytes of all weights, without MTP modules."""
        ffn, hidden = self.ffn, self.hidden_size
        linear, routed = self.layers * self.attention.projection_weights(hidden), 0
        if isinstance(ffn, ExpertFFN):
            sparse, expert = self.layers - ffn.dense_layers, ffn.expert_weights(hidden)
            routed = sparse * ffn.experts * expert
            linear += sparse * ffn.shared_experts * expert + ffn.dense_layers * 3 * hidden * ffn.dense_intermediate_size
        else:
            linear += self.layers * ffn.weights(hidden)
        remainder = self.parameters - linear - routed
        return linear * WEIGHT_BYTES[formats.linear] + routed * WEIGHT_BYTES[formats.experts] + remainder * 2.0

    def named(self, name: str) -> Model:
        """The model whose first checkpoint is the one that a name means: a repository, or a format behind the name."""
        plain = name.lower()
        for published in self.checkpoints:
            repository = (published.repository or "").lower()
            if plain in (repository, repository.rpartition("/")[2]):
                return self.published_as(published)
        match = FORMAT.search(plain)
        if match is None:
            return self
        stated: Weights = "fp4" if match[1] == "nvfp4" else match[1]  # type: ignore[assignment]  # of the pattern
        formats = self.formats(stated)
        return self.published_as(
            self.checkpoint(formats) or Checkpoint(weights=formats.linear, experts=formats.experts)
        )

    def published_as(self, checkpoint: Checkpoint) -> Model:
        """The model whose first checkpoint is this one."""
        following = [candidate for candidate in self.checkpoints if candidate != checkpoint]
        return self.model_copy(update={"checkpoints": [checkpoint, *following]})

    def without_formats(self, error: BadInput) -> Model:
        """The model of weights in a format that is not known here; `formats` raises the error."""
        model = self.model_copy()
        model._unknown_format = error
        return model

    def kv_bytes(self, bytes_per_element: float) -> float:
        """The bytes that one token adds to the KV cache of one layer, V_token (eq. 24)."""
        return self.attention.cached_elements * bytes_per_element


def load_model(name: str | Path, base: Path = Path()) -> Model:
    """Load a built-in model file by one of its names (`builtin_files`), or a file by path.

    Relative paths start from `base`. The first checkpoint is the one that the name means.
    """
    path = find_data("models", name, base)
    try:
        status = path.stat()
    except (OSError, ValueError):
        return _read_model(path)  # which refuses it in the usual words
    model = _known_model(path, (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size))
    return model if isinstance(name, Path) or name == path.stem else model.named(name)


def _read_model(path: Path) -> Model:
    return checked(Model, read_yaml(path), path)


@lru_cache(maxsize=32)  # a sweep loads the same model in each of its points
def _known_model(path: Path, state: tuple[int, ...]) -> Model:
    """The model of a file, read once as long as the file stays as it is."""
    return _read_model(path)
