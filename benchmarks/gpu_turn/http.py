"""Streams over HTTP from `twin serve-live`: output tokens a second, and time per token, at several numbers of clients.

python -m benchmarks.gpu_turn.http --device cuda [--tiny] --out FILE
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_turn.stages import ROOT, stage_parser
from benchmarks.provenance import provenance
from benchmarks.streaming import read_streams

MODELS = ROOT / "examples" / "models"


def serve(model: Path, device: str, streams: int) -> subprocess.Popen[str]:
    """A server with random weights on a port of its own, which its first line names."""
    command = [
        sys.executable, "-m", "twin", "serve-live", "--model", str(model), "--random-weights", "--device", device,
        "--port", "0", "--max-num-seqs", str(streams),
    ]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def measure(port: int, streams: int, tokens: int) -> dict[str, Any]:
    """One row; the first run is for the graphs."""
    read_streams(port, streams, tokens)
    begin = time.perf_counter()
    read_streams(port, streams, tokens)
    seconds = time.perf_counter() - begin
    return {"streams": streams, "tokens_per_second": streams * tokens / seconds, "seconds_per_step": seconds / tokens}


def main(arguments: list[str] | None = None) -> int:
    """The command's entry point."""
    options = stage_parser(__doc__).parse_args(arguments)
    model = MODELS / ("tiny-llama.json" if options.tiny else "qwen3-0.6b.json")
    clients, tokens = ((1, 2), 4) if options.tiny else ((1, 32, 256), 128)
    head = provenance("twin.gpu-http/1") | {"device": options.device, "model": model.name, "tokens": tokens}
    rows: list[dict[str, Any]] = []
    with serve(model, options.device, max(clients)) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            port = int(line.split()[0].rsplit(":", 1)[1].strip("/"))
            for streams in clients:
                rows.append(measure(port, streams, tokens))
                options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
                row = rows[-1]
                print(f"{streams} streams: {row['tokens_per_second']:.0f} tokens/s, "
                      f"{1e3 * row['seconds_per_step']:.2f} ms a step")  # fmt: skip
        finally:
            server.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
