"""Seconds of the kernels of a step by the roofline. Plain arithmetic, which runs compiled in every simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from latency_models.deployment.hardware import Hardware, Precision
from latency_models.deployment.models import GroupedQueryAttention, Model
from latency_models.sources.roofline.efficiency import ONE_SHOT, Efficiency, Kind, Reached
from latency_models.sources.roofline.placement import CACHE_BYTES, COMPUTED_IN, WEIGHT_BYTES, Cache, Placement
from latency_models.sources.roofline.work import (
    ACTIVATION_BYTES,
    DISPATCHED_BYTES,
    EXCHANGES,
    EXCHANGES_OVER_NODES,
    MORE_PRECISE,
    SMALL_KERNELS,
    WHOLE_STEP,
    ExpertRows,
    Experts,
    Matrix,
    attention_shape,
    elementwise_bytes,
    head,
    kinds_of_parts,
    linear_kind,
    matrices,
    routed_experts,
    sent_copies,
    state_shape,
)
from latency_models.stages import TENSORS_SENT
from schedulers.batches import Batch

CLEARLY_LESS = 1 - 1e-9
"""A share of some seconds below which others are less whatever the rounding."""


def attended_pairs(tokens: int, context: int, window: int) -> float:
    """Pairs of a query and a token that it attends to, of a chunk behind `context` tokens; a window of 0 is none."""
    if not window or context + tokens <= window:
        return tokens * (context + 0.5 * (tokens + 1))
    rising = max(window - context, 0)  # queries that see fewer tokens than the window
    return rising * (context + 0.5 * (rising + 1)) + (tokens - rising) * window


class StepKernels:
    """The kernels of one engine's step.

    Args:
        scales: factors on each part of a step and on the whole. floor: kernels that no step is faster than, if any.
        link, load: as in `RooflineStepTime`.

    Attributes:
        kinds: of the kernels of each part.
    """

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        placement: Placement,
        efficiency: Efficiency,
        link: Literal["intra_node", "inter_node"],
        scales: dict[str, float],
        load: ExpertRows,
        floor: StepKernels | None,
    ) -> None:
        self.model = model
        self.hardware = hardware
        self.placement = placement
        self.efficiency = efficiency
        self.scales = scales
        self.kinds: dict[str, Kind] = kinds_of_parts(model, hardware, placement)
        self._link = link
        grouped = placement.data_parallel > 1 and placement.tensor_parallel <= hardware.devices_per_node
        self._tensor_link: Literal["intra_node", "inter_node"] = "intra_node" if grouped else link
        self._load = load
        self._floor = floor
        self._whole_step: float = scales[WHOLE_STEP]
        self._layers: int = model.layers
        self._host_layer: float = efficiency.engine.layer
        self._host_prompt_layer: float = efficiency.engine.prompt_layer
        self._host_sequence: float = efficiency.engine.per_sequence
        self._matrices = list(matrices(model, placement))
        self._head = head(model, placement)
        self._experts = routed_experts(model, placement, load)
        self._small_bytes: float = elementwise_bytes(model, placement)
        self._ways: dict[tuple[Kind, Precision], list[tuple[float, float, float]]] = {}
        self._by_rows: dict[int, float] = {}
        self._by_outputs: dict[int, float] = {}
        self._by_gathered: dict[int, float] = {}
        self._by_decodes: dict[tuple[int, int], float] = {}
        self._above_floor: dict[tuple[int, int], bool] = {}
        self._prepare_attention()

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """A compiled object has no dictionary to be pickled."""
        parts = (self.model, self.hardware, self.placement, self.efficiency)
        return StepKernels, (*parts, self._link, self.scales, self._load, self._floor)

    def rank_seconds(self, batch: Batch | None, gathered: int) -> float:
        """Seconds of a rank's step, while all ranks together have `gathered` rows."""
        seconds, floor = self._rank_seconds(batch, gathered), self._floor
        if floor is None:
            return seconds
        decodes = batch is None or not (batch.chunks or batch.draft_tokens)
        if decodes and self._is_above_floor(0 if batch is None else batch.n_decodes, gathered):
            return seconds
        return max(seconds, floor.rank_seconds(batch, gathered))

    def decode_seconds(self, decodes: int, kv: int, gathered: int, steps: int) -> list[float]:
        """The same of successive steps of the same decodes."""
        seconds, floor = self._decode_seconds(decodes, kv, gathered, steps), self._floor
        if floor is None or self._is_above_floor(decodes, gathered):
            return seconds
        return list(map(max, seconds, floor.decode_seconds(decodes, kv, gathered, steps)))

    def group_decode_seconds(self, runs: Sequence[tuple[int, int, int]], gathered: int, steps: int) -> list[float]:
        """The same of the slowest rank at each step, by (decodes, kv, longest) of each."""
        if not self._window and all([self._is_above_floor(decodes, gathered) for decodes, _, _ in runs]):
            runs = self._slowest(runs, gathered, steps)
        ranks = [self.decode_seconds(decodes, kv, gathered, steps) for decodes, kv, _ in runs]
        return ranks[0] if len(ranks) == 1 else list(map(max, *ranks))

    def _slowest(
        self, runs: Sequence[tuple[int, int, int]], gathered: int, steps: int
    ) -> Sequence[tuple[int, int, int]]:
        """Ranks that may be the slowest. Times lie on lines: one below another at both ends is below it between."""
        first = [self._rank_decode(decodes, kv, gathered) for decodes, kv, _ in runs]
        last = [self._rank_decode(decodes, kv + decodes * (steps - 1), gathered) for decodes, kv, _ in runs]
        sums = [begin + end for begin, end in zip(first, last, strict=True)]
        slow = sums.index(max(sums))
        begin, end = CLEARLY_LESS * first[slow], CLEARLY_LESS * last[slow]
        return [run for i, run in enumerate(runs) if i == slow or first[i] > begin or last[i] > end]

    def _is_above_floor(self, decodes: int, gathered: int) -> bool:
        """True if decode steps are slower than the floor's however many tokens are cached."""
        floor = self._floor
        if floor is None:
            return True
        above = self._above_floor.get((decodes, gathered))
        if above is None:
            own, least = CLEARLY_LESS * self._whole_step, floor._whole_step
            above = least * floor._fixed(decodes, gathered) < own * self._fixed(decodes, gathered)
            if decodes:
                above = above and least * floor._decode_token <= own * self._decode_token
                above = above and least * floor._index_token <= own * self._index_token
            self._above_floor[decodes, gathered] = above
        return above

    def _rank_seconds(self, batch: Batch | None, gathered: int) -> float:
        if batch is None:
            return self._rank_decode(0, 0, gathered)
        decodes = batch.n_decodes
        if not (batch.chunks or batch.draft_tokens):
            return self._rank_decode(decodes, batch.decode_kv, gathered)
        attention = self._prompt_attention(batch) if batch.chunks else 0.0
        attention += self._decode_attention(decodes, batch.decode_kv) if decodes else 0.0
        layer = self._host_layer + (self._host_prompt_layer if batch.chunks else 0.0)
        host = layer * self._layers + self._host_sequence * batch.outputs
        shared = self._shared(batch.tokens) + self._routed(gathered)
        return self._whole_step * (shared + self.sampled(batch.outputs) + attention + host)

    def _decode_seconds(self, decodes: int, kv: int, gathered: int, steps: int) -> list[float]:
        if not decodes:
            return [self._rank_decode(0, 0, gathered)] * steps
        run = range(kv, kv + decodes * steps, decodes)
        if self._window:
            return [self._rank_decode(decodes, tokens, gathered) for tokens in run]
        # As `_rank_decode`, to the last bit, with everything that stays the same before the loop.
        scale = self._whole_step
        fixed = self._decode_fixed(decodes, gathered)
        layers = self._full_layers
        token = self._decode_token
        return [scale * (fixed + token * (layers * tokens)) for tokens in run]

    def message(self, tokens: int) -> float:
        """Seconds of what one pipeline stage sends to the next."""
        seconds = self._send(tokens * self.model.hidden_size)
        return self._whole_step * self.scales["all_reduce_kernels"] * seconds

    # -- kernels -----------------------------------------------------------------------------------------------------

    def _reached(self, kind: Kind) -> Reached:
        return self.efficiency.kernels[kind].of(self.hardware.name)

    def _kernel(self, kind: Kind, flops: float, size: float, precision: Precision) -> float:
        """Seconds of one kernel, by the fastest way to compute it (`MORE_PRECISE`)."""
        ways = self._ways.get((kind, precision))
        if ways is None:
            ways = self._ways[kind, precision] = self._ways_of(kind, precision)
        return min([launch + max(flops / compute, size / memory) for launch, compute, memory in ways])

    def _ways_of(self, kind: Kind, precision: Precision) -> list[tuple[float, float, float]]:
        """Seconds of a launch, FLOP/s and bytes/s that are reached in each way that the hardware has."""
        hardware, ways = self.hardware, []
        for way, by in ((kind, precision), *MORE_PRECISE.get(kind, ())):
            if by in hardware.peak_flops:
                reached = self._reached(way)
                assert reached.compute is not None
                compute, memory = hardware.flops(by) * reached.compute, hardware.memory_bandwidth * reached.memory
                ways.append((reached.launch, compute, memory))
        return ways

    def _linear(self, matrix: Matrix, rows: int) -> float:
        weights = matrix.columns * matrix.inner
        size = weights * WEIGHT_BYTES[matrix.weights] + rows * (matrix.columns + matrix.inner) * ACTIVATION_BYTES
        return matrix.times * self._kernel(
            linear_kind(matrix.weights), 2.0 * rows * weights, size, COMPUTED_IN[matrix.weights]
        )

    def _shared(self, rows: int) -> float:
        """Seconds of all kernels that depend on the rows of one rank: linear layers, elementwise ones, all-reduces."""
        seconds = self._by_rows.get(rows)
        if seconds is None:
            seconds = self._by_rows[rows] = self._rows_seconds(rows) if rows else 0.0
        return seconds

    def _rows_seconds(self, rows: int) -> float:
        model, placement = self.model, self.placement
        layers, hidden = (model.mixers + model.layers_with_ffn) / 2, model.hidden_size
        linear = sum(self._linear(matrix, rows) for matrix in self._matrices)
        small = self._reached("elementwise")
        elementwise = layers * (
            SMALL_KERNELS * small.launch + rows * self._small_bytes / (self.hardware.memory_bandwidth * small.memory)
        )
        # Behind attention, and behind a dense FFN; experts have their own.
        apart = self._experts is not None and placement.data_parallel > 1
        reductions = model.mixers + (0 if apart else model.layers_with_ffn)
        messages = reductions * self._all_reduce(placement.tensor_parallel, rows * hidden, self._tensor_link)
        if placement.pipeline_parallel > 1:
            messages += (placement.pipeline_parallel - 1) * self._send(rows * hidden)
        scales = self.scales
        return (
            scales["linear_kernels"] * linear
            + scales["elementwise_kernels"] * elementwise
            + scales["all_reduce_kernels"] * messages
        )

    def _routed(self, gathered: int) -> float:
        """Seconds of the routed experts of all layers, over the rows of all attention replicas together."""
        if self._experts is None or not gathered:
            return 0.0
        seconds = self._by_gathered.get(gathered)
        if seconds is None:
            seconds = self._by_gathered[gathered] = self._experts_seconds(gathered)
        return seconds

    def _experts_seconds(self, gathered: int) -> float:
        experts = self._experts
        assert experts is not None
        kind, weights = self.kinds["experts_kernels"], experts.columns * experts.hidden
        rows = experts.rows(gathered)
        size = experts.touched(gathered) * weights * WEIGHT_BYTES[experts.weights]
        size += 2 * gathered * experts.hidden * ACTIVATION_BYTES
        compute = experts.times * self._kernel(kind, 2.0 * rows * weights, size, COMPUTED_IN[experts.weights])
        messages = 0.0
        if self.placement.data_parallel > 1:
            messages = experts.times * self._exchange(experts, gathered)
        return self.scales["experts_kernels"] * compute + self.scales["all_reduce_kernels"] * messages

    def _exchange(self, experts: Experts, gathered: int) -> float:
        """Seconds in which rows reach the devices of their experts, and results return, by the fastest way.

        Rows go to the devices, or over nodes to the nodes, of their experts. In a node, all may gather all rows, and
        reduce and scatter results.
        """
        devices, network = self.placement.stage_devices, self.hardware.network
        size = gathered / devices * experts.hidden * DISPATCHED_BYTES[COMPUTED_IN[experts.weights]]
        within = self._link == "intra_node"
        places = float(devices) if within else max(devices / self.hardware.devices_per_node, 2.0)
        rate = network.intra_node if within else network.inter_node
        kinds = [kind for kind in (EXCHANGES if within else EXCHANGES_OVER_NODES) if kind in self.efficiency.kernels]
        seconds: list[float] = []
        if within or not kinds:
            seconds.append(self._all_reduce(devices, gathered * experts.hidden, self._link))
        for kind in kinds:
            reached = self._reached(kind)
            copies = sent_copies(places, experts.chosen, each_expert=kind.endswith("_ll"))
            seconds.append(reached.launch + copies * size / (rate * reached.memory))
        return min(seconds)

    def sampled(self, outputs: int) -> float:
        """Seconds of the output head."""
        cached = self._by_outputs.get(outputs)
        if cached is None:
            seconds = self.scales["linear_kernels"] * self._linear(self._head, outputs) if outputs else 0.0
            cached = self._by_outputs[outputs] = seconds
        return cached

    def _all_reduce(self, devices: int, elements: float, link: Literal["intra_node", "inter_node"]) -> float:
        if devices == 1:
            return 0.0
        efficiency = self._reached(self.kinds["all_reduce_kernels"])
        size = 2.0 * (devices - 1) / devices * elements * ACTIVATION_BYTES
        rate = getattr(self.hardware.network, link) * efficiency.memory
        second = efficiency.two_shots if devices > 2 and devices * elements * ACTIVATION_BYTES >= ONE_SHOT else 0.0
        return float(efficiency.launch + (devices - 2) * efficiency.each_device + second + size / rate)

    def _send(self, elements: float) -> float:
        """Seconds of a message to the next pipeline stage, one part from each device of a stage."""
        efficiency, network = self._reached(self.kinds["all_reduce_kernels"]), self.hardware.network
        within = self.placement.devices <= self.hardware.devices_per_node
        rate = (network.intra_node if within else network.inter_node) * efficiency.memory
        size = TENSORS_SENT * elements * ACTIVATION_BYTES / self.placement.tensor_parallel
        return efficiency.launch + size / rate

    # -- attention ---------------------------------------------------------------------------------------------------

    def _prepare_attention(self) -> None:
        """Seconds a token of decode attention, which runs in every simulated step."""
        self._shape = attention_shape(self.model, self.placement)
        self._cached: float = self._shape.cached
        self._query: float = self._shape.query
        cache, kinds = self.placement.cache, self.kinds
        launch, token, padding = self._decode_parts(kinds["decode_attention_kernels"], cache)
        if kinds["decode_attention_kernels"] == "decode_attention_fp8":  # no slower than the larger cache
            wide = self._decode_parts("decode_attention_bf16", "bf16")
            launch, token, padding = min(launch, wide[0]), min(token, wide[1]), min(padding, wide[2])
        model, attention = self.model, self.model.attention
        if isinstance(attention, GroupedQueryAttention):
            self._window, self._windowed_layers = attention.window, model.windowed_layers
        else:
            self._window = attention.indexer.top_k if attention.indexer else 0
            self._windowed_layers = model.attention_layers if self._window else 0
        self._full_layers = model.attention_layers - self._windowed_layers
        scale = self.scales["decode_attention_kernels"]
        self._decode_launch = scale * launch * model.attention_layers
        self._decode_token = scale * token
        self._decode_row = scale * padding * model.attention_layers
        self._prepare_indexers()
        self._prepare_states()

    def _prepare_indexers(self) -> None:
        """Seconds that indexers add to a step of decodes, beside those of each cached token."""
        indexer, layers = self.model.indexer, self.model.indexer_layers
        self._indexer = indexer
        self._index_token = 0.0
        self._index_precision: Precision = "fp8" if "fp8" in self.hardware.peak_flops else "bf16"
        if indexer is None:
            return
        reached, scale = self._reached("decode_index"), self.scales["decode_index_kernels"] * layers
        token = indexer.cached_bytes / (self.hardware.memory_bandwidth * reached.memory)
        assert reached.compute is not None
        rate = self.hardware.flops(self._index_precision) * reached.compute
        token = max(token, 2 * indexer.heads * indexer.head_dim / rate)
        self._index_token = scale * token
        self._decode_launch += scale * reached.launch
        self._decode_row += scale * token * reached.padding

    def _prepare_states(self) -> None:
        linear = self.model.linear_attention
        self._states = state_shape(linear, self.placement.tensor_parallel) if linear else None
        if self._states is None:
            return
        kind, scale = self.kinds["decode_state_kernels"], self.scales["decode_state_kernels"] * self.model.linear_layers
        launch = self._reached(kind).launch
        self._decode_launch += scale * launch
        row = self._kernel(kind, self._states.decode_flops, self._states.sequence_bytes, "bf16") - launch
        self._decode_row += scale * row

    def _decode_parts(self, kind: Kind, cache: Cache) -> tuple[float, float, float]:
        """Seconds of a launch, of a cached token, and of the tokens that each sequence costs beside its own."""
        efficiency, shape, hardware = self._reached(kind), self._shape, self.hardware
        token = shape.cached * CACHE_BYTES[cache] / (hardware.memory_bandwidth * efficiency.memory)
        if efficiency.compute is not None:
            token = max(token, shape.decode_flops / (hardware.flops("bf16") * efficiency.compute))
        return efficiency.launch, token, token * efficiency.padding

    def _decode_attention(self, decodes: int, kv: int) -> float:
        attended = self._decode_token * self._attended(decodes, kv) + self._index_token * kv
        return self._decode_launch + self._decode_row * decodes + attended

    def _prompt_attention(self, batch: Batch) -> float:
        seconds = self._full_layers * self._prompt_layer(batch, 0)
        if self._window:
            seconds += self._windowed_layers * self._prompt_layer(batch, self._window)
        seconds *= self.scales["prompt_attention_kernels"]
        return seconds + self._prompt_indexers(batch) + self._prompt_states(batch)

    def _prompt_indexers(self, batch: Batch) -> float:
        """Seconds of all indexers for a batch's chunks: every query scores every token that it sees."""
        indexer = self._indexer
        if indexer is None:
            return 0.0
        pairs = sum(attended_pairs(chunk.tokens, chunk.context, 0) for chunk in batch.chunks)
        size = sum(chunk.context + chunk.tokens for chunk in batch.chunks) * indexer.cached_bytes
        flops = 2.0 * indexer.heads * indexer.head_dim * pairs
        layers = self.scales["prompt_index_kernels"] * self.model.indexer_layers
        return layers * self._kernel("prompt_index", flops, size, self._index_precision)

    def _prompt_states(self, batch: Batch) -> float:
        states = self._states
        if states is None:
            return 0.0
        tokens = sum(chunk.tokens for chunk in batch.chunks)
        size = tokens * states.prompt_bytes + len(batch.chunks) * states.sequence_bytes
        layers = self.scales["prompt_state_kernels"] * self.model.linear_layers
        return layers * self._kernel(self.kinds["prompt_state_kernels"], tokens * states.prompt_flops, size, "bf16")

    def _prompt_layer(self, batch: Batch, window: int) -> float:
        """Seconds in one layer; a window of 0 is none."""
        cached, query, element = self._cached, self._query, CACHE_BYTES[self.placement.cache]
        pairs, size = 0.0, 0.0
        for chunk in batch.chunks:
            tokens, context = chunk.tokens, chunk.context
            pairs += attended_pairs(tokens, context, window)
            visible = context + tokens
            size += (min(visible, window + tokens) if window else visible) * cached * element
            size += tokens * query * ACTIVATION_BYTES
        return self._kernel(self.kinds["prompt_attention_kernels"], pairs * self._shape.prompt_flops, size, "bf16")

    def _rank_decode(self, decodes: int, kv: int, gathered: int) -> float:
        if not decodes:
            return self._whole_step * self._fixed(0, gathered)
        attended = self._decode_token * self._attended(decodes, kv) + self._index_token * kv
        return self._whole_step * (self._decode_fixed(decodes, gathered) + attended)

    def _fixed(self, decodes: int, gathered: int) -> float:
        """Seconds of a decode step without cached tokens; 0 decodes mean an idle rank."""
        return self._decode_fixed(decodes, gathered) if decodes else self._shared(0) + self._routed(gathered)

    def _decode_fixed(self, decodes: int, gathered: int) -> float:
        fixed = self._by_decodes.get((decodes, gathered))
        if fixed is None:
            host = self._host_layer * self._layers + self._host_sequence * decodes
            linear = self._shared(decodes) + self._routed(gathered) + self.sampled(decodes)
            fixed = linear + self._decode_launch + self._decode_row * decodes + host
            self._by_decodes[decodes, gathered] = fixed
        return fixed

    def _attended(self, decodes: int, kv: int) -> int:
        tokens = self._full_layers * kv
        return tokens + self._windowed_layers * min(kv, decodes * self._window) if self._window else tokens
