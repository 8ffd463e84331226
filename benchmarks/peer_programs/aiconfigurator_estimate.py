"""One estimate of NVIDIA AIConfigurator, for the lengths of the workload of `benchmarks.peers`.

    python aiconfigurator_estimate.py WORKLOAD_JSON

Package: aiconfigurator. This file imports nothing of this project, since it runs under the interpreter that has it. It
answers another question: the latencies of a fixed batch, in closed form, with no arrivals, queue or percentiles. The
estimate is that of Llama-3.1-8B on an A100 with vLLM, since the package has no Llama-2-7B, at the number of concurrent
requests that ours has by Little's law.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

from aiconfigurator.cli.api import cli_estimate


def estimate(work: dict[str, int]) -> tuple[float, float, float]:
    """Seconds of a call, its CPU seconds, and the seconds a token that it answers."""
    start, cpu = time.perf_counter(), time.process_time()
    result = cli_estimate(
        model_path="meta-llama/Meta-Llama-3.1-8B",
        system_name="a100_sxm",
        backend_name="vllm",
        isl=work["prompt"],
        osl=work["answer"],
        batch_size=work["concurrent"],
        ctx_tokens=work["max_num_batched_tokens"],
    )
    return time.perf_counter() - start, time.process_time() - cpu, result.tpot / 1e3


def main() -> None:
    """Estimate twice, since the first call reads tables; the last line printed is a JSON object."""
    work = json.loads(sys.argv[1])
    first, _, _ = estimate(work)
    seconds, cpu, token = estimate(work)
    print(
        json.dumps(
            {
                "version": version("aiconfigurator"),
                "seconds": seconds,
                "cpu": cpu,
                "first": first,
                "mean_itl": token,
            }
        )
    )


if __name__ == "__main__":
    main()
