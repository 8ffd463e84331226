"""The table of `twin adapt serve`: quality and measured speed of modules behind a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def served_table(document: Mapping[str, Any]) -> str:
    """The table, from the command's document."""
    width = max(len(task) for task in document["tasks"])
    lines = [f"{'task':{width}}  served  offline  same answers"]
    for task, row in document["tasks"].items():
        shares = (row["exact_match_served"], row["exact_match_offline"], row["equal_answers"])
        served, offline, same = (f"{100 * share:.1f} %" for share in shares)
        lines.append(f"{task:{width}} {served:>7} {offline:>8} {same:>13}")
    steps = document["decode_steps_by_models"]
    total = sum(steps)
    mean = sum(models * count for models, count in enumerate(steps, 1)) / total if total else 0.0
    largest = max((models for models, count in enumerate(steps, 1) if count), default=0)
    bits = "" if document["bits"] is None else f" in {document['bits']} bits"
    decoders = len(document["tasks"]) if document["decode"] == "isolated" else 1
    lines += [
        f"measured: {document['tokens_per_second']:.0f} tokens/s, {1e3 * document['ttft_mean']:.1f} ms to the first "
        f"token, {1e3 * document['tpot_mean']:.2f} ms per further token",
        f"{document['decode']} decoding: {decoders} decode module{'s' * (decoders > 1)}{bits}, "
        f"{document['decoder_bytes'] / 2**20:.2f} MiB",
        f"tasks in a decode step: {mean:.1f} on average, {largest} at most",
    ]
    return "\n".join(lines)
