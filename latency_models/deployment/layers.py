"""Layers of a model: kinds of attention, and how many experts tokens touch.

Experts are not used evenly: the fullest rank has several times the mean load, without and with EPLB. A token chooses
experts by their popularity. Experts lie on ranks in an order that knows nothing of it, so that one rank has more tokens
than the mean; every other rank waits for it. EPLB counts the tokens of each expert over a period, gives the most
popular ones replicas, and packs all of them onto ranks so that these are as even as possible.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from latency_models.io.config_io import Strict
from latency_models.io.files import FilePath, read_columns
from workloads.errors import BadInput

Linear: TypeAlias = tuple[str, float, float]
"""A linear layer on one device: its name, outputs and inputs. Names of latent attention begin with "mla"."""


def weights_of(layers: Iterable[Linear]) -> int:
    """Weights of linear layers."""
    return int(sum(columns * inner for _, columns, inner in layers))


class Projected(Strict):
    """Base class of kinds of attention."""

    @abstractmethod
    def projections(self, hidden: int, width: int = 1) -> list[Linear]:
        """The linear layers of one layer on one of `width` devices."""

    def projection_weights(self, hidden: int) -> int:
        """Weights of the linear layers of one layer."""
        return weights_of(self.projections(hidden))


class GroupedQueryAttention(Projected):
    """Grouped queries (GQA; MHA has as many KV heads as heads), maybe normed head by head, or gated (Qwen3-Next).

    `window`: most tokens that a query attends to, in `windowed_layers`; AFD rooflines count every layer as full
    attention.
    """

    kind: Literal["gqa"]
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    qk_norm: bool = False
    output_gate: bool = False
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

    @property
    def queries(self) -> int:
        """Columns of the query projection over the size of a head: queries, and their gates."""
        return self.heads * (2 if self.output_gate else 1)

    def projections(self, hidden: int, width: int = 1) -> list[Linear]:
        """Queries, keys and values, and the output, on one of `width` devices; KV heads are split down to one."""
        columns = (self.queries / width + 2 * max(self.kv_heads / width, 1.0)) * self.head_dim
        return [("qkv", columns, hidden), ("output", hidden, self.heads / width * self.head_dim)]

    @property
    def norm_weights(self) -> int:
        """Weights of the normalisations inside the attention of one layer."""
        return 2 * self.head_dim if self.qk_norm else 0


INDEX_KEY_BYTES = 1.0
INDEX_SCALE_BYTES = 4.0
"""Bytes of an element of an indexer's cached key, which is in FP8, and of the key's scale."""


class Indexer(Strict):
    """The indexer of sparse attention (DSA): it scores the cached tokens, of which a query attends to the best `top_k`.

    `layers`: that have an indexer; the others take the choice of one before them. None: all.
    """

    heads: PositiveInt
    head_dim: PositiveInt
    top_k: PositiveInt
    layers: PositiveInt | None = None

    @property
    def cached_bytes(self) -> float:
        """Bytes that one token adds to the cache of one indexer."""
        return self.head_dim * INDEX_KEY_BYTES + INDEX_SCALE_BYTES

    def projections(self, hidden: int, q_compressed: int) -> list[Linear]:
        """Queries from compressed ones, and a key with weights of heads; not split over devices."""
        queries = ("mla index queries", self.heads * self.head_dim, q_compressed)
        return [queries, ("mla index key", self.head_dim + self.heads, hidden)]

    @property
    def norm_weights(self) -> int:
        """Weights of the LayerNorm of the key."""
        return 2 * self.head_dim


class LatentAttention(Projected):
    """Latent attention (MLA): keys and values are cached as one compressed vector and one rotary key (AFD B.1)."""

    kind: Literal["mla"]
    heads: PositiveInt
    kv_compressed: PositiveInt
    rope_dim: PositiveInt
    q_compressed: NonNegativeInt
    nope_dim: PositiveInt
    value_dim: PositiveInt
    indexer: Indexer | None = None

    @property
    def cached_elements(self) -> int:
        """The elements d_c + d_rope that a token adds to the KV cache of one layer (eq. 24)."""
        return self.kv_compressed + self.rope_dim

    def projections(self, hidden: int, width: int = 1) -> list[Linear]:
        """Down-projections, which are not split over devices, up-projections, and the output."""
        heads = self.heads / width
        queries = heads * (self.nope_dim + self.rope_dim)
        return [
            ("mla down", (self.q_compressed or queries) + self.cached_elements, hidden),
            *([("mla queries", queries, self.q_compressed)] if self.q_compressed else ()),
            ("mla keys and values", heads * (self.nope_dim + self.value_dim), self.kv_compressed),
            ("mla output", hidden, heads * self.value_dim),
        ]

    @property
    def norm_weights(self) -> int:
        """Weights of the normalisations of the compressed queries, and keys and values, of one layer."""
        return self.q_compressed + self.kv_compressed


Attention: TypeAlias = GroupedQueryAttention | LatentAttention

STATE_BYTES = 4.0
CONVOLUTION_BYTES = 2.0
"""Bytes of an element of a recurrent state, which engines keep in FP32, and of a convolution's last inputs."""


class LinearAttention(Projected):
    """Layers whose cache is a state of fixed size for each sequence, in place of keys and values of each token.

    Gated DeltaNet (`gdn`, Qwen3-Next), Kimi Delta Attention (`kda`, Kimi Linear) and Mamba-2 (`mamba2`, where key heads
    are its groups, the key's size its state size, and value heads its heads). Queries, keys and values go through a
    causal convolution over each channel; the state of a value head is a matrix of key by value size. `gate_rank`: size
    between a gate's two matrices (kda); 0: one matrix.
    """

    kind: Literal["gdn", "kda", "mamba2"]
    layers: PositiveInt
    key_heads: PositiveInt
    value_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    convolution: PositiveInt = 4
    gate_rank: NonNegativeInt = 0
    state_bytes: PositiveFloat = STATE_BYTES

    @model_validator(mode="after")
    def _whole_groups(self) -> LinearAttention:
        if self.value_heads % self.key_heads:
            expected = f"expected a divisor of value_heads ({self.value_heads})"
            raise BadInput(expected, field="key_heads", value=self.key_heads)
        return self

    @property
    def values(self) -> int:
        """Elements of the values of a token, and of the output."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def state_elements(self) -> int:
        """Elements of the state of one sequence in one layer."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def sequence_bytes(self) -> float:
        """Bytes that a layer keeps of one sequence: the state, and the last inputs of the convolution."""
        return self.state_elements * self.state_bytes + (self.convolution - 1) * self.convolved * CONVOLUTION_BYTES

    def projections(self, hidden: int, width: int = 1) -> list[Linear]:
        """Convolved channels and each head's own, gates, and the output."""
        heads = self.value_heads * (2 if self.kind == "gdn" else 1)
        gates = 2 if self.kind == "kda" else 1
        gate = [(self.gate_rank, hidden), (self.values, self.gate_rank)] if self.gate_rank else [(self.values, hidden)]
        inputs = [(self.convolved + heads, hidden), *gates * gate]
        name = "linear attention"
        return [*((name, columns / width, inner) for columns, inner in inputs),
                (f"{name} output", hidden, self.values / width)]  # fmt: skip

    @property
    def small_weights(self) -> int:
        """Weights of the convolution, the heads' own parameters and the norm of the output, of one layer."""
        convolution = self.convolved * (self.convolution + (1 if self.kind == "mamba2" else 0))
        if self.kind == "gdn":
            return convolution + 2 * self.value_heads + self.value_dim
        if self.kind == "kda":
            return convolution + self.value_heads + self.values + self.value_dim
        return convolution + 3 * self.value_heads + self.values


Floats: TypeAlias = NDArray[np.float64]

ORDERS = 64
"""Orders of experts over which the load of the fullest rank is averaged."""


class ExpertBalancer(Strict):
    """EPLB: slots beyond one for each expert, and seconds between two rebalancings and of each."""

    replicas: NonNegativeInt = 0
    period: PositiveFloat
    cost: NonNegativeFloat = 0.0


class ExpertLoad(Strict):
    """The popularity of the routed experts of a layer; without `eplb` they stay where they are.

    It is uniform; power_law, whose density falls as x^-exponent from 1 to `ratio`; or the column `tokens` of a CSV
    file.
    """

    popularity: Literal["uniform", "power_law", "measured"] = "uniform"
    exponent: NonNegativeFloat = 1.01
    ratio: float = Field(default=1000.0, ge=1)
    path: FilePath | None = None
    eplb: ExpertBalancer | None = None

    @model_validator(mode="after")
    def _measured_has_a_file(self) -> ExpertLoad:
        if (self.popularity == "measured") != (self.path is not None):
            raise BadInput(
                "expected a file with popularity measured, and none otherwise", field="path", value=self.path
            )
        return self

    @property
    def slowdown(self) -> float:
        """Factor on all steps for the time that rebalancings take."""
        return 1.0 + self.eplb.cost / self.eplb.period if self.eplb else 1.0

    def shares(self, experts: int, base: Path = Path()) -> Floats:
        """The falling share of the tokens of each expert; `BadInput` for a file with another number of experts."""
        if self.path is not None:
            path = base / self.path
            tokens = np.array(read_columns(path).numbers("tokens", above=0.0))
            if len(tokens) != experts:
                raise BadInput(f"expected a row for each of the {experts} experts", value=len(tokens), file=path)
        elif self.popularity == "uniform":
            tokens = np.ones(experts)
        else:
            tokens = power_law(self.exponent, self.ratio, experts)
        ordered: Floats = np.sort(tokens)[::-1] / tokens.sum()
        return ordered

    def fullest(self, experts: int, ranks: int, base: Path = Path()) -> float:
        """Tokens of the fullest rank over the mean of all: 1 where they are even."""
        return fullest_rank(self.shares(experts, base), ranks, self.eplb)


def power_law(exponent: float, ratio: float, count: int) -> Floats:
    """The mid-quantiles of a density that falls as x^-exponent from 1 to `ratio`."""
    quantiles = (np.arange(count) + 0.5) / count
    power = 1.0 - exponent
    if abs(power) < 1e-9:
        values: Floats = ratio**quantiles
    else:
        values = (1.0 + quantiles * (ratio**power - 1.0)) ** (1.0 / power)
    return values


def fullest_rank(shares: Floats, ranks: int, eplb: ExpertBalancer | None = None) -> float:
    """Tokens of the fullest rank over the mean: of experts in any order, on average, or as EPLB packs them."""
    if eplb is not None:
        return ranks * max(packed(replicated(shares, eplb.replicas), ranks))
    experts = len(shares)
    slots = -(-experts // ranks)
    padded = np.concatenate([shares, np.zeros(slots * ranks - experts)])
    generator = np.random.default_rng(0)  # an average over orders, the same in every run
    loads = [generator.permutation(padded).reshape(ranks, slots).sum(axis=1).max() for _ in range(ORDERS)]
    return ranks * float(np.mean(loads))


def replicated(shares: Floats, replicas: int) -> list[float]:
    """The share of each slot, if each further one goes to the expert with the largest share a slot."""
    heap = [(-share, share, 1) for share in shares.tolist()]
    heapq.heapify(heap)
    for _ in range(replicas):
        _, share, copies = heap[0]
        heapq.heapreplace(heap, (-share / (copies + 1), share, copies + 1))
    return [share / copies for _, share, copies in heap for _ in range(copies)]


def packed(slots: list[float], ranks: int) -> list[float]:
    """The load of each rank, if slots go, the largest first, to the emptiest rank that has room."""
    room = -(-len(slots) // ranks)
    heap = [(0.0, rank, 0) for rank in range(ranks)]
    full: list[float] = []
    for share in sorted(slots, reverse=True):
        load, rank, count = heapq.heappop(heap)
        if count + 1 == room:
            full.append(load + share)
        else:
            heapq.heappush(heap, (load + share, rank, count + 1))
    return full + [load for load, _, _ in heap]
