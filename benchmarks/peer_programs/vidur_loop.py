"""Vidur's event loop on the workload of `benchmarks.peers`, without its metrics.

    python vidur_loop.py WORKLOAD_JSON

Package: vidur (0.0.26). This file imports nothing of this project, since it runs under the interpreter that has it. The
package lacks the measurements that its step times are learnt from, so that `StatedStepTime`, the same linear step time
as ours, takes the place of its predictor: the cost of the predictor is left out, in Vidur's favour.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

from vidur._native.entities import ExecutionTime
from vidur.config import config as settings
from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
from vidur.simulator import Simulator

STEP_TIME: dict[str, float] = {}


class StatedStepTime:
    """Seconds of a batch: overhead, and a share for each token and each cached token that it attends to."""

    _native_execution_time_predictor = None

    def __init__(self, predictor_config: Any, replica_config: Any, cache_config: Any) -> None:
        self.layers = replica_config.num_layers_per_pipeline_stage

    def get_execution_time(self, batch: Any, stage: int) -> ExecutionTime:
        """All of it as one layer's decode attention, in milliseconds, the unit of Vidur's parts."""
        seconds = STEP_TIME["overhead"] + STEP_TIME["per_token"] * sum(batch.num_q_tokens)
        seconds += STEP_TIME["per_kv_token"] * sum(batch.num_kv_tokens)
        return ExecutionTime(self.layers, 0, 0, 1e3 * seconds / self.layers, *[0] * 11)


def configuration(work: dict[str, Any], folder: str) -> settings.SimulationConfig:
    """One replica of one GPU with Sarathi's chunked prefill, and no output."""
    predictor = settings.LinearRegressionExecutionTimePredictorConfig()
    ExecutionTimePredictorRegistry.unregister(predictor.get_type())
    ExecutionTimePredictorRegistry.register(predictor.get_type(), StatedStepTime)
    replica = settings.ReplicaConfig(
        model_name="meta-llama/Llama-2-7b-hf",
        device="a100",
        network_device="a100_dgx",
        num_pipeline_stages=1,
        tensor_parallel_size=1,
    )
    scheduler = settings.SarathiSchedulerConfig(
        chunk_size=work["max_num_batched_tokens"], batch_size_cap=work["max_num_seqs"]
    )
    cache = settings.CacheConfig(block_size=work["block_size"], num_blocks=work["num_gpu_blocks"])
    requests = settings.SyntheticRequestGeneratorConfig(
        length_generator_config=settings.FixedRequestLengthGeneratorConfig(
            prefill_tokens=work["prompt"], decode_tokens=work["answer"]
        ),
        interval_generator_config=settings.PoissonRequestIntervalGeneratorConfig(qps=work["rate"]),
        num_requests=work["requests"],
    )
    quiet = settings.MetricsConfig(
        write_metrics=False, write_json_trace=False, enable_chrome_trace=False, store_plots=False, output_dir=folder
    )
    return settings.SimulationConfig(
        log_level="error",
        cluster_config=settings.ClusterConfig(
            num_replicas=1, replica_config=replica, cache_config=cache, replica_scheduler_config=scheduler
        ),
        request_generator_config=requests,
        execution_time_predictor_config=predictor,
        metrics_config=quiet,
    )


def main() -> None:
    """Run once; the last line printed is a JSON object."""
    work = json.loads(sys.argv[1])
    STEP_TIME.update(work["step_time"])
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(work, folder)
        start, cpu = time.perf_counter(), time.process_time()
        simulator = Simulator(config)
        simulator._write_output = lambda: None  # its plots and tables
        simulator.run()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(
        json.dumps(
            {
                "version": version("vidur"),
                "seconds": seconds,
                "cpu": cpu,
                "requests": work["requests"],
                "output_tokens": work["requests"] * work["answer"],
                "simulated_seconds": simulator._time,
                "mean_itl": None,
            }
        )
    )


if __name__ == "__main__":
    main()
