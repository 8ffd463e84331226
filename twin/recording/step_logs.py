"""Keeps a step log of vLLM as a run, and says what it has seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from latency_models.sources.vllm_step_log.step_log import FILE, LoggedSteps, read_logged_steps
from workloads.errors import BadInput


def record_step_log(log: Path, output: Path) -> LoggedSteps:
    """Check a log (`BadInput`), and copy it into a run's folder, with `meta.json`."""
    steps = read_logged_steps(log)
    if (output / FILE).exists():
        raise BadInput(f"expected a folder without {FILE}", field="--output", value=str(output))
    output.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(steps.source, output / FILE)
    meta = {"source": "twin observe", "model": steps.model, "clock": steps.clock}
    (output / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return steps


def seen(steps: LoggedSteps) -> list[str]:
    """Lines on the batches that a log has, and on those that it lacks."""
    rows = [step for stretch in steps.stretches for step in stretch]
    kinds = {
        "decodes alone": [step for step in rows if not step.chunks],
        "prompts beside decodes": [step for step in rows if step.chunks and step.decodes],
        "prompts alone": [step for step in rows if step.chunks and not step.decodes],
    }
    lines = [
        f"{len(rows)} steps of {steps.model}, {sum(step.seconds for step in rows):.1f} s by the {steps.clock} clock"
    ]
    for kind, part in kinds.items():
        if not part:
            lines.append(f"not seen: {kind}")
            continue
        most = max(step.rows for step in part)
        lines.append(f"{kind}: {len(part)} steps of up to {most} tokens and {max(s.decodes for s in part)} decodes")
    decodes = {step.decodes for step in rows}
    missing = [count for count in range(1, max(decodes) + 1) if count not in decodes]
    if missing:
        lines.append(f"not seen: {', '.join(map(str, missing[:8]))}{' …' if len(missing) > 8 else ''} decodes")
    return lines
