"""A router that prefers the engine with the longest cached prefix."""

from __future__ import annotations

from collections.abc import Sequence as Many

from schedulers.routing import ROUTERS, Draw, Engine
from workloads.request import Request


class LongestPrefix:
    """The engine that has most of the prompt cached; the most free blocks among equals, then the smallest load."""

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        return max(engines, key=lambda engine: (engine.cached_prefix_tokens(request), engine.free_blocks, -engine.load))


@ROUTERS.register("longest_prefix")
def longest_prefix(draw: Draw) -> LongestPrefix:
    return LongestPrefix()
