"""Tiers below the device's KV cache: `engine.kv_offloading`."""

from __future__ import annotations

from typing import Annotated

from pydantic import NonNegativeFloat, PositiveFloat

from latency_models.io.config_io import Strict
from scenarios.limits import Engines
from scenarios.registered import registered
from schedulers.engine_config import KVOffloading, TierConfig, WritePolicy
from schedulers.tier_eviction import EVICTION_POLICIES


class TierSpec(Strict):
    """One tier: bytes; bytes/s of its link in each direction, and seconds of each copy; what a full tier gives up."""

    capacity: PositiveFloat
    bandwidth: PositiveFloat
    latency: NonNegativeFloat = 0.0
    eviction: Annotated[str, registered(EVICTION_POLICIES)] = "lru"


class KVOffloadingSpec(Strict):
    """KV blocks that leave the device go to host memory, and from there to disk.

    Attributes:
        bytes_per_token: of KV cache. write_policy, attention_tokens: see `schedulers.engine_config.KVOffloading`.
        host, disk: the tiers of one engine. engines_per_host: so many engines of a pool share the links to load from.
    """

    bytes_per_token: PositiveFloat
    write_policy: WritePolicy = "write_through"
    host: TierSpec
    disk: TierSpec | None = None
    engines_per_host: Engines = 1
    attention_tokens: PositiveFloat = 32768.0

    @property
    def tiers(self) -> dict[str, TierSpec]:
        """The tiers by name, nearest first."""
        return {"host": self.host} | ({} if self.disk is None else {"disk": self.disk})

    def build(self, prefix_id_tokens: int) -> KVOffloading:
        """The scheduler's settings.

        Raises:
            ValueError: a tier without room for one prefix id.
        """
        size = self.bytes_per_token * prefix_id_tokens
        tiers = tuple(TierConfig(name, int(tier.capacity / size), tier.eviction) for name, tier in self.tiers.items())
        return KVOffloading(tiers, self.write_policy, self.attention_tokens)
