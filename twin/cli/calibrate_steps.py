"""`twin calibrate steps`: step times of a vLLM that logs its steps."""

from __future__ import annotations

import math
from pathlib import Path

from twin.cli.options import Json, Output
from twin.process import configure_libraries
from workloads.errors import BadInput


def steps(run: Path, /, *, output: Output, json: Json = False) -> int:
    """Fit step times to a step log of vLLM, and say what was learned, what was not seen, and how sure it is.

    The file is for step_time: {source: engine_regression, path: FILE}. Every fifth stretch of 60 steps is held out.

    Args:
        run: Folder that twin observe --vllm-log wrote, or a step log of a scheduler class of live.vllm.
        output: File to write.
    """
    configure_libraries()
    import numpy as np

    from latency_models.io.config_io import write_yaml
    from latency_models.sources.engine_regression import EngineRegression, EngineRegressionFile
    from latency_models.sources.vllm_step_log.step_log import UNPADDED, read_logged_steps
    from reports.calibration import step_log_report
    from twin.cli.console import note, print_json, print_table, write_or_print
    from twin.recording.step_logs import seen
    from twin.validation.fitting import fitted_document
    from twin.validation.recordings import ProfilingRecording

    log = read_logged_steps(run)
    rounds = [[(0.0, step) for step in stretch] for stretch in log.stretches]
    provenance = {
        "device": "unknown", "model": log.model, "versions": {},
        "note": f"steps of a running vLLM, {log.source.name}; every fifth stretch held out",
    }  # fmt: skip
    with np.errstate(all="ignore"):  # of steps that a bad log makes 0
        document = fitted_document([ProfilingRecording(rounds)], UNPADDED, log.clock, provenance)
    if not math.isfinite(document["round_spread"]):
        expected = "expected durations that batches explain; clock: direct is for a model in the scheduler's process"
        raise BadInput(expected, field="step_time_us", file=log.source)
    write_or_print(write_yaml(document), output)
    unknowns = EngineRegression.from_file(EngineRegressionFile.model_validate(document)).unknowns()
    result = {
        "schema": "twin.step-log/1",
        "output": str(output),
        "seen": seen(log),
        **{name: document[name] for name in ("heldout_median_error", "heldout_p90_error", "largest")},
        "unknowns": [
            {
                "name": row.name,
                "about": row.about,
                "basis": row.basis,
                "deviation": row.deviation,
                "measure": row.measure,
            }
            for row in unknowns
        ],
    }
    if json:
        print_json(result)
    else:
        print_table(step_log_report(result))
    note(f"next: step_time: {{source: engine_regression, path: {output}}} in a scenario")
    return 0
