"""The workers of a topology as rank 0 sees them, wherever they run."""

from __future__ import annotations

from typing import Protocol

from live.topologies.transport import Role, Transport, TransportError


class Workers(Protocol):
    """Workers that have loaded their models, and the means to drive the front's role among them."""

    @property
    def transport(self) -> Transport:
        """Rank 0's side of the transport."""
        ...

    def run(self, role: Role) -> None:
        """Run the front's role to its end.

        Raises:
            TransportError: a worker has failed.
        """
        ...

    def wake(self) -> None:
        """Resume the front's role if it is idle. May be called from any thread."""
        ...

    def fail(self, reason: str) -> TransportError:
        """An error of the front itself, made known to the workers; an earlier failure of another goes first."""
        ...

    def disconnect(self) -> None:
        """Close the connections: the workers notice it at once."""
        ...

    def close(self) -> None:
        """Wait until the workers have ended."""
        ...
