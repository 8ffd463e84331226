"""The head of every benchmark's document: its date, commit and machine."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twin.api.run_folder import manifest
from twin.process import runs_compiled


def provenance(schema: str) -> dict[str, Any]:
    """The fields schema, date, version, commit, python, compiled (hot modules run as C extensions) and machine."""
    document = manifest({})
    return {
        "schema": schema,
        "date": datetime.now(UTC).date().isoformat(),
        **{name: document[name] for name in ("version", "commit", "python")},
        "compiled": runs_compiled(),
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """A description of this machine."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "device": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
