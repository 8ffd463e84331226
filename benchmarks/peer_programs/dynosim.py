"""NVIDIA DynoSim on the workload of `benchmarks.peers`, in process and without a report.

    python dynosim.py WORKLOAD_JSON

Package: ai-dynamo-runtime, with the compiled simulator. This file imports nothing of this project, since it runs under
the interpreter that has it. Step times are DynoSim's default, `polynomial`, which cannot be set to ours. The call is
timed, without its report.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

from dynamo._core import run_mocker_synthetic_trace_replay


def main() -> None:
    """Run once; the last line printed is a JSON object."""
    work = json.loads(sys.argv[1])
    engine = {
        "backend": "vllm",
        "num_gpu_blocks": work["num_gpu_blocks"],
        "block_size": work["block_size"],
        "max_num_seqs": work["max_num_seqs"],
        "max_num_batched_tokens": work["max_num_batched_tokens"],
        "enable_prefix_caching": False,
    }
    start, cpu = time.perf_counter(), time.process_time()
    result = run_mocker_synthetic_trace_replay(
        work["prompt"],
        work["answer"],
        work["requests"],
        extra_engine_args={"engine": engine},
        request_rate=work["rate"],
    )
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    summary = result.summary
    print(
        json.dumps(
            {
                "version": version("ai-dynamo-runtime"),
                "seconds": seconds,
                "cpu": cpu,
                "requests": summary["completed_requests"],
                "output_tokens": summary["total_output_tokens"],
                "simulated_seconds": summary["duration_ms"] / 1e3,
                "mean_itl": summary["mean_itl_ms"] / 1e3,
            }
        )
    )


if __name__ == "__main__":
    main()
