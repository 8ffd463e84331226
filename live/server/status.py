"""Endpoints about the server: health, models, version, metrics."""

from __future__ import annotations

from live.server.asgi import HttpExchange
from live.server.replies import Models, Status, Version
from live.server.service import Service


async def health(service: Service, request: None, exchange: HttpExchange) -> Status:
    """The status of the server; 503 if the engine has failed or the server is shutting down."""
    service.check_available(None)
    return {"status": "ok"}


async def models(service: Service, request: None, exchange: HttpExchange) -> Models:
    """The served models."""
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": service.started,
                "owned_by": "serving-twin",
                "root": name,
                "max_model_len": service.model.max_model_len,
            }
            for name in service.model.names
        ],
    }


async def version(service: Service, request: None, exchange: HttpExchange) -> Version:
    """The version of this program."""
    return {"version": service.version}


async def metrics(service: Service, request: None, exchange: HttpExchange) -> bytes:
    """Metrics in Prometheus' text format."""
    return service.exporter.text()
