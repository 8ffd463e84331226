"""`twin serve-live`: the live engine behind HTTP. The command is the server's own."""

from __future__ import annotations

from live.server.command import serve_live

__all__ = ["serve_live"]
