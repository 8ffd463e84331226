"""Parts of the commands that train models: a flag, and the message of an interrupted training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cyclopts import Parameter

FLAG = Parameter(negative=())

STATE = "training.safetensors"
"""The file of a training's state, as `live.adaptation` names it."""


@contextlib.contextmanager
def resumable(directory: Path) -> Iterator[None]:
    """Give an interruption of the block a message that says what the directory keeps."""
    try:
        yield
    except KeyboardInterrupt:
        state = directory / STATE
        kept = f"the state of the training is kept in {state}, and the same command goes on there"
        raise KeyboardInterrupt(kept if state.exists() else "") from None
