"""vLLM's rule for data-parallel engines: the fewest requests, where one that waits counts as four that run."""

from __future__ import annotations

from collections.abc import Sequence as Many

from schedulers.routing import ROUTERS, Draw, Engine
from workloads.request import Request


@ROUTERS.register("fewest_requests")
class FewestRequests:
    """Chooses by counts of requests alone."""

    DRAWS = READS_CACHES = False

    def __init__(self, draw: Draw) -> None:
        pass

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        """See `Router.choose`."""
        return min(engines, key=lambda engine: 4 * engine.num_waiting + engine.num_running)
