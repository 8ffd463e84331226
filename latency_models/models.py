"""Model files: the shapes that decide how many bytes a token's cache takes and how many FLOPs its FFN costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from latency_models.calibration import find_data
from latency_models.strict import Strict, explain_validation, read_yaml


class GroupedQueryAttention(Strict):
    """GQA (and MHA, with as many KV heads as heads)."""

    kind: Literal["gqa"]
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt

    @property
    def cached_elements(self) -> int:
        """Elements that one token adds to the KV cache of one layer: keys and values of every KV head."""
        return 2 * self.kv_heads * self.head_dim

    def projection_weights(self, hidden: int) -> int:
        """Weights of the query, key, value and output projections of one layer."""
        return hidden * self.head_dim * 2 * (self.heads + self.kv_heads)


class LatentAttention(Strict):
    """MLA: keys and values are cached as one compressed vector and one rotary key (AFD B.1)."""

    kind: Literal["mla"]
    heads: PositiveInt
    kv_compressed: PositiveInt
    rope_dim: PositiveInt
    q_compressed: PositiveInt
    nope_dim: PositiveInt
    value_dim: PositiveInt

    @property
    def cached_elements(self) -> int:
        """d_c + d_rope of eq. 24."""
        return self.kv_compressed + self.rope_dim

    def projection_weights(self, hidden: int) -> int:
        """Weights of the down- and up-projections of queries, keys and values, and of the output, of one layer."""
        query = self.q_compressed * (hidden + self.heads * (self.nope_dim + self.rope_dim))
        key_value = hidden * self.cached_elements + self.kv_compressed * self.heads * (self.nope_dim + self.value_dim)
        return query + key_value + self.heads * self.value_dim * hidden


class DenseFFN(Strict):
    """SwiGLU with three matrices."""

    kind: Literal["dense"]
    intermediate_size: PositiveInt

    def weights(self, hidden: int) -> int:
        """Weights of one layer."""
        return 3 * hidden * self.intermediate_size


class ExpertFFN(Strict):
    """Mixture of experts, each SwiGLU; the first `dense_layers` layers are dense."""

    kind: Literal["moe"]
    intermediate_size: PositiveInt
    experts: PositiveInt
    experts_per_token: PositiveInt
    shared_experts: NonNegativeInt = 0
    dense_layers: NonNegativeInt = 0
    dense_intermediate_size: NonNegativeInt = 0

    def expert_weights(self, hidden: int) -> int:
        """Weights of one expert."""
        return 3 * hidden * self.intermediate_size

    def weights(self, hidden: int) -> int:
        """Weights of one MoE layer: every expert, routed and shared, and the router."""
        return (self.experts + self.shared_experts) * self.expert_weights(hidden) + hidden * self.experts


class Model(Strict):
    """One transformer."""

    schema_: Literal["twin.model/1"] = Field(alias="schema")
    name: str
    hidden_size: PositiveInt
    layers: PositiveInt
    vocabulary: PositiveInt
    tied_embeddings: bool
    attention: Annotated[GroupedQueryAttention | LatentAttention, Field(discriminator="kind")]
    ffn: Annotated[DenseFFN | ExpertFFN, Field(discriminator="kind")]
    mtp_depth: NonNegativeInt = 0
    published_parameters: PositiveFloat
    source: str

    @property
    def parameters(self) -> int:
        """Weights of all matrices, without norms, biases and any MTP module."""
        hidden = self.hidden_size
        embeddings = self.vocabulary * hidden * (1 if self.tied_embeddings else 2)
        dense = self.ffn.dense_layers if isinstance(self.ffn, ExpertFFN) else 0
        dense_size = self.ffn.dense_intermediate_size if isinstance(self.ffn, ExpertFFN) else 0
        ffn = (self.layers - dense) * self.ffn.weights(hidden) + dense * 3 * hidden * dense_size
        return embeddings + self.layers * self.attention.projection_weights(hidden) + ffn

    def kv_bytes(self, bytes_per_element: float) -> float:
        """Eq. 24: bytes that one token adds to the KV cache of one layer."""
        return self.attention.cached_elements * bytes_per_element


def load_model(name: str, base: Path = Path()) -> Model:
    """A built-in model file by its name, or a file; relative paths start from `base`.

    Raises:
        BadInput: neither, or a file that breaks the schema.
    """
    path = find_data("models", name, base)
    try:
        return Model.model_validate(read_yaml(path))
    except ValidationError as error:
        raise explain_validation(error, path, Model) from None
