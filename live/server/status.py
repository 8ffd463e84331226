"""What is asked of a server rather than of its model."""

from __future__ import annotations

from live.server.exchange import Exchange
from live.server.replies import Models, Status, Version
from live.server.service import Service


async def health(service: Service, asked: None, exchange: Exchange) -> Status:
    """Whether requests are served; 503 when the engine has failed or the server is shutting down."""
    service.check(None)
    return {"status": "ok"}


async def models(service: Service, asked: None, exchange: Exchange) -> Models:
    """The one model."""
    return {
        "object": "list",
        "data": [
            {
                "id": service.name,
                "object": "model",
                "created": service.started,
                "owned_by": "serving-twin",
                "root": service.name,
                "max_model_len": service.contexts,
            }
        ],
    }


async def version(service: Service, asked: None, exchange: Exchange) -> Version:
    """Of this program."""
    return {"version": service.version}


async def metrics(service: Service, asked: None, exchange: Exchange) -> bytes:
    """Prometheus' page."""
    return service.page.text()
