"""Model files: the shapes that determine KV-cache bytes and FLOPs, and the formats of weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr, model_validator

from latency_models.deployment.layers import Attention, Indexer, Linear, weights_of
from latency_models.deployment.layers import GroupedQueryAttention as GroupedQueryAttention
from latency_models.deployment.layers import LatentAttention as LatentAttention
from latency_models.deployment.layers import LinearAttention as LinearAttention
from latency_models.io.config_io import Strict, checked, read_yaml
from latency_models.io.files import FORMAT, find_data
from workloads.errors import BadInput

Weights: TypeAlias = Literal["bf16", "fp8", "int8", "fp4", "mxfp4", "int4"]

WEIGHT_BYTES: dict[Weights, float] = {
    "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625, "mxfp4": 0.53125, "int4": 0.5625,
}  # fmt: skip
"""Bytes of one weight. Of the 4-bit formats, NVFP4 has an 8-bit scale for 16 weights, MXFP4 one for 32, and INT4 a
16-bit scale for 32."""

OF_EXPERTS: tuple[Weights, ...] = ("mxfp4", "int4")
"""Formats that are known of experts alone."""


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of the linear layers (projections, dense FFNs, shared experts) and of the routed experts."""

    linear: Weights
    experts: Weights

    def __str__(self) -> str:
        return self.linear if self.linear == self.experts else f"{self.linear}, experts in {self.experts}"


def _ffn(hidden: int, inner: float, matrices: int, name: str = "") -> list[Linear]:
    return [(f"{name}gate_up", (matrices - 1) * inner, hidden), (f"{name}down", hidden, inner)]


ROUTER = "router"
"""The linear layer that is in bf16 whatever the format of the others."""


class DenseFFN(Strict):
    """A dense FFN: SwiGLU with three matrices, or, where it is not gated, two with an activation between them."""

    kind: Literal["dense"]
    intermediate_size: PositiveInt
    gated: bool = True

    @property
    def matrices(self) -> int:
        """Matrices of one FFN."""
        return 3 if self.gated else 2

    def projections(self, hidden: int, width: int = 1) -> list[Linear]:
        """The FFN of one layer on one of `width` devices."""
        return _ffn(hidden, self.intermediate_size / width, self.matrices)

    def weights(self, hidden: int) -> int:
        """Weights of one layer."""
        return weights_of(self.projections(hidden))

    def row_flops(self, hidden: int) -> int:
        """FLOPs of one row, two a weight: 6·H·I of SwiGLU."""
        return 2 * self.weights(hidden)


class ExpertFFN(Strict):
    """Mixture of experts, each SwiGLU (`gated`); the first `dense_layers` layers are dense.

    `shared_experts`: experts that see every token. `latent_size`: elements to which a token is projected for the routed
    experts, and back; 0: they see all of them.
    """

    kind: Literal["moe"]
    intermediate_size: PositiveInt
    experts: PositiveInt
    experts_per_token: PositiveInt
    shared_experts: NonNegativeInt = 0
    router_bias: bool = False
    dense_layers: NonNegativeInt = 0
    dense_intermediate_size: NonNegativeInt = 0
    gated: bool = True
    latent_size: NonNegativeInt = 0

    @model_validator(mode="after")
    def _agrees(self) -> ExpertFFN:
        if self.experts_per_token > self.experts:
            expected = f"expected at most the experts there are ({self.experts})"
            raise BadInput(expected, field="experts_per_token", value=self.experts_per_token)
        if self.dense_layers and not self.dense_intermediate_size:
            raise BadInput("expected a size, since dense_layers is not 0", field="dense_intermediate_size", value=0)
        return self

    @property
    def matrices(self) -> int:
        """Matrices of one expert."""
        return 3 if self.gated else 2

    def expert_width(self, hidden: int) -> int:
        """Elements of a token that a routed expert sees."""
        return self.latent_size or hidden

    def expert_weights(self, hidden: int) -> int:
        """Weights of one routed expert."""
        return self.matrices * self.expert_width(hidden) * self.intermediate_size

    def projections(self, hidden: int, width: int = 1) -> list[Linear]:
        """The linear layers of one layer for every token, on one of `width` devices, without the router."""
        latent, layers = self.latent_size / width, []
        if self.shared_experts:
            layers += _ffn(hidden, self.shared_experts * self.intermediate_size / width, self.matrices, "shared ")
        if latent:
            layers += [("latent down", latent, hidden), ("latent up", hidden, latent)]
        return layers

    def dense_layer(self, hidden: int, width: int = 1) -> list[Linear]:
        """The FFN of one of the dense layers."""
        return _ffn(hidden, self.dense_intermediate_size / width, 3)

    def shared_weights(self, hidden: int) -> int:
        """Weights of `projections`."""
        return weights_of(self.projections(hidden))

    def dense_weights(self, hidden: int) -> int:
        """Weights of `dense_layer`."""
        return weights_of(self.dense_layer(hidden))

    def row_flops(self, hidden: int) -> int:
        """FLOPs of one row in one expert, two a weight: 6·H·d_expert (eq. 27)."""
        return 2 * self.expert_weights(hidden)

    def router_weights(self, hidden: int) -> int:
        """Weights of the router of one layer."""
        return self.experts * (hidden + (1 if self.router_bias else 0))

    def weights(self, hidden: int) -> int:
        """Weights of one MoE layer: every expert, routed and shared, and the router."""
        routed = self.experts * self.expert_weights(hidden)
        return routed + self.shared_weights(hidden) + self.router_weights(hidden)


class Checkpoint(Strict):
    """Published weights on Hugging Face, or None for weights that are nowhere.

    `experts`: format of routed experts; None: as `weights`. `bytes`: of its safetensors, with scales, biases and MTP.
    """

    repository: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    weights: Weights = "bf16"
    experts: Weights | None = None
    bytes: PositiveInt | None = None

    @property
    def formats(self) -> Formats:
        return Formats(self.weights, self.experts or self.weights)


AS_PUBLISHED = Checkpoint()
"""The weights of a model file that states none."""


class Model(Strict):
    """One transformer: `attention` of layers with a KV cache, `linear_attention` of those with a state.

    `ffn_layers`: layers that are an FFN alone; None: every layer has one. `checkpoints`: the first is the default.
    """

    schema_: Literal["twin.model/1"] = Field(alias="schema")
    name: Annotated[str, Field(min_length=1)]
    hidden_size: PositiveInt
    layers: PositiveInt
    vocabulary: PositiveInt
    tied_embeddings: bool
    attention: Annotated[Attention, Field(discriminator="kind")]
    linear_attention: LinearAttention | None = None
    ffn: Annotated[DenseFFN | ExpertFFN, Field(discriminator="kind")]
    ffn_layers: PositiveInt | None = None
    mtp_depth: NonNegativeInt = 0
    published_parameters: PositiveFloat | None = None
    checkpoints: list[Checkpoint] = Field(default_factory=list)
    source: str
    _unknown_format: BadInput | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _layers_agree(self) -> Model:
        indexer = self.indexer
        parts = (
            ("ffn_layers", self.ffn_layers or 0, self.layers),
            ("ffn.dense_layers", getattr(self.ffn, "dense_layers", 0), self.layers_with_ffn),
            ("linear_attention.layers", self.linear_layers, self.mixers),
            ("attention.windowed_layers", self.windowed_layers, self.attention_layers),
            ("attention.indexer.layers", (indexer.layers or 0) if indexer else 0, self.attention_layers),
        )
        for field, layers, available in parts:
            if layers > available:
                raise BadInput(f"expected at most the layers there are ({available})", field=field, value=layers)
        return self

    @property
    def layers_with_ffn(self) -> int:
        """Layers that have an FFN."""
        return self.layers if self.ffn_layers is None else self.ffn_layers

    @property
    def mixers(self) -> int:
        """Layers that mix tokens: by attention with a KV cache, or with a state."""
        return self.layers - (self.ffn_layers or 0)

    @property
    def linear_layers(self) -> int:
        """Layers with a state for each sequence."""
        return self.linear_attention.layers if self.linear_attention else 0

    @property
    def attention_layers(self) -> int:
        """Layers with a KV cache."""
        return self.mixers - self.linear_layers

    @property
    def windowed_layers(self) -> int:
        """Layers whose attention has a window."""
        return self.attention.windowed_layers if isinstance(self.attention, GroupedQueryAttention) else 0

    @property
    def indexer(self) -> Indexer | None:
        """The indexer of sparse attention; None for a model without it."""
        return self.attention.indexer if isinstance(self.attention, LatentAttention) else None

    @property
    def indexer_layers(self) -> int:
        """Layers with an indexer."""
        indexer = self.indexer
        return 0 if indexer is None else indexer.layers or self.attention_layers

    def with_mtp(self) -> Model:
        """The model with its MTP modules: each is one more layer with a KV cache and an FFN (DeepSeek-V3, section 2.2).

        The matrix and the two norms before it (`mtp_weights`) are not in the layers. Embedding and head are shared.
        """
        if not self.mtp_depth:
            raise BadInput("expected a model with MTP modules", field="model", value=self.name)
        alone = self.ffn_layers is not None  # attention and FFN are layers of their own
        added = {"layers": self.layers + (1 + alone) * self.mtp_depth}
        added |= {"ffn_layers": (self.ffn_layers or 0) + self.mtp_depth} if alone else {}
        return self.model_copy(update=added)

    @property
    def mtp_weights(self) -> int:
        """Weights of MTP modules outside their layers: a matrix that joins two vectors, and their norms."""
        return self.mtp_depth * (2 * self.hidden_size**2 + 2 * self.hidden_size)

    def check_layers_alike(self) -> None:
        """Refuse a model with layers without a KV cache or an FFN, and one with sparse attention."""
        linear, indexer = self.linear_attention, self.indexer
        if linear or indexer or self.ffn_layers is not None:
            kind = linear.kind if linear else "an indexer (DSA)"
            expected = (
                f"expected a model of layers that are all alike and attend to every token: {self.name} has {kind}"
            )
            raise BadInput(f"{expected}; source roofline knows such layers", field="model", value=self.name)

    @property
    def embedding_parameters(self) -> int:
        """Weights of the token embedding and, where it is not the same matrix, the output head."""
        return self.vocabulary * self.hidden_size * (1 if self.tied_embeddings else 2)

    def projections(self, width: int = 1) -> Iterator[tuple[int, Linear]]:
        """The linear layers that all rows go through, with the times that they occur, on one of `width` devices.

        Routed experts, embeddings and the output head are not among them.
        """
        ffn, hidden, attention, linear = self.ffn, self.hidden_size, self.attention, self.linear_attention
        parts = [(self.attention_layers, attention.projections(hidden, width))]
        if isinstance(attention, LatentAttention) and attention.indexer is not None:
            parts.append((self.indexer_layers, attention.indexer.projections(hidden, attention.q_compressed)))
        if linear is not None:
            parts.append((linear.layers, linear.projections(hidden, width)))
        if isinstance(ffn, ExpertFFN):
            parts.append((self.expert_layers, [(ROUTER, ffn.experts, hidden), *ffn.projections(hidden, width)]))
            parts += [(ffn.dense_layers, ffn.dense_layer(hidden, width))] if ffn.dense_layers else []
        else:
            parts.append((self.layers_with_ffn, ffn.projections(hidden, width)))
        return ((times, layer) for times, layers in parts for layer in layers)

    @property
    def linear_weights(self) -> int:
        """Weights of linear layers but for routed experts, routers, embeddings and the output head."""
        norms = self.indexer_layers * self.indexer.norm_weights if self.indexer else 0
        return norms + sum(times * weights_of([layer]) for times, layer in self.projections() if layer[0] != ROUTER)

    @property
    def routed_weights(self) -> int:
        """Weights of routed experts."""
        ffn = self.ffn
        if not isinstance(ffn, ExpertFFN):
            return 0
        return self.expert_layers * ffn.experts * ffn.expert_weights(self.hidden_size)

    @property
    def parameters(self) -> int:
        """All weights, without MTP modules. Biases of projections are ignored; these models have none."""
        ffn, hidden, attention, linear = self.ffn, self.hidden_size, self.attention, self.linear_attention
        small = self.attention_layers * attention.norm_weights + (self.mixers + self.layers_with_ffn + 1) * hidden
        small += self.linear_layers * linear.small_weights if linear else 0
        routers = self.expert_layers * ffn.router_weights(hidden) if isinstance(ffn, ExpertFFN) else 0
        return self.embedding_parameters + self.linear_weights + self.routed_weights + small + routers

    @property
    def expert_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers_with_ffn - self.ffn.dense_layers if isinstance(self.ffn, ExpertFFN) else 0

    @property
    def published_formats(self) -> Formats | None:
        """The formats of the first checkpoint; None where they are not known here."""
        return None if self._unknown_format is not None else (self.checkpoints or [AS_PUBLISHED])[0].formats

    def formats(self, weights: Weights | None = None, experts: Weights | None = None) -> Formats:
        """The formats that are stated, and those of the first checkpoint for what is not.

        MXFP4 and INT4 are formats of experts alone: stated for a mixture of experts, its linear layers are in bf16.
        """
        if weights is None:
            published = self.published_formats
            if published is None:
                assert self._unknown_format is not None
                raise self._unknown_format
            return Formats(published.linear, experts or published.experts)
        linear = "bf16" if weights in OF_EXPERTS and isinstance(self.ffn, ExpertFFN) else weights
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
        linear, routed = self.linear_weights, self.routed_weights
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

    def kv_bytes_per_token(self, bytes_per_element: float) -> float:
        """The bytes that one token adds to the KV cache of all layers, and to the keys of indexers."""
        indexer = self.indexer
        keys = self.indexer_layers * indexer.cached_bytes if indexer else 0.0
        return self.attention_layers * self.kv_bytes(bytes_per_element) + keys

    @property
    def state_bytes_per_sequence(self) -> float:
        """The bytes that one sequence keeps beside its KV cache, whatever its length: states of linear attention."""
        return self.linear_layers * self.linear_attention.sequence_bytes if self.linear_attention else 0.0


def load_model(name: str | Path, base: Path = Path()) -> Model:
    """Load a built-in model file by one of its names (`builtin_files`), or a file by path, relative to `base`."""
    path = find_data("models", name, base)
    try:
        status = path.stat()
    except (OSError, ValueError):
        return _known_model(path, ())  # which refuses it in the usual words
    model = _known_model(path, (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size))
    return model if isinstance(name, Path) or name == path.stem else model.named(name)


@lru_cache(maxsize=32)  # a sweep loads the same model in each of its points
def _known_model(path: Path, state: tuple[int, ...]) -> Model:
    """The model of a file, read once as long as the file stays as it is."""
    return checked(Model, read_yaml(path), path)
