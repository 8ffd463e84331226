"""`twin init`: writes a scenario to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def init(
    *,
    model: str = "llama-3.1-8b",
    gpu: str = "h100-sxm",
    weights: str | None = None,
    rate: float | None = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
) -> int:
    """Write a serving scenario with comments, which runs as it is: one model on the fewest GPUs that hold it.

    Step times are computed from data sheets (source roofline), so that nothing needs to be measured.

    Parameters
    ----------
    model
        Built-in name, Hugging Face id, a model file or a config.json.
    gpu
        Built-in name of a device or the begin of it (h200), or a hardware file.
    weights
        Format of the weights: bf16, fp8, int8, fp4, or mxfp4 for experts alone. Default: as the model is published.
    rate
        Requests a second. Default: about half of what one engine bears.
    output
        File to write, which must not exist; default: print it.
    """
    from reports.records.run_directory import naming
    from twin.api.starting_scenario import starting_scenario
    from twin.cli.console import note
    from workloads.errors import BadInput

    if rate is not None and not rate > 0:
        raise BadInput("expected a number above 0", field="--rate", value=rate)
    text = starting_scenario(model, gpu, weights, rate)
    if output is None:
        print(text, end="")
        return 0
    if output.exists():
        raise BadInput("expected a file that is not there yet", field="--output", value=str(output))
    with naming(output):
        output.write_text(text, encoding="utf-8")
    note(f"next: twin simulate {output}")
    return 0
