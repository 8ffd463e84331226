"""What the process keeps."""

from __future__ import annotations

import gc

from live.memory import keep_what_is_loaded


def test_what_is_loaded_is_no_longer_walked_and_later_garbage_still_is() -> None:
    """The collector sees next to nothing of what was there, and still finds a cycle that comes after."""

    class Cyclic:
        """Refers to itself; says when it goes."""

        gone = False

        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            Cyclic.gone = True

    before = len(gc.get_objects())
    try:
        keep_what_is_loaded()
        assert len(gc.get_objects()) < before / 100
        Cyclic()
        gc.collect()
        assert Cyclic.gone
    finally:
        gc.unfreeze()
