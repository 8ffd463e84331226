"""The live plant needs the extra [live]."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the live plant needs the extra [live]")
