"""`twin init`: writes a scenario to start from."""

from __future__ import annotations

from twin.cli.options import FileOrStdout
from workloads.errors import BadInput


def init(
    *,
    model: str = "llama-3.1-8b",
    gpu: str = "h100-sxm",
    weights: str | None = None,
    rate: float | None = None,
    output: FileOrStdout = None,
) -> int:
    """Write a serving scenario with comments, which runs as it is: one model on the fewest GPUs that hold it.

    Step times are computed from data sheets (source roofline), so that nothing needs to be measured. A file that is
    there already is not overwritten.

    Args:
        model: Built-in name, Hugging Face id, a model file or a config.json.
        gpu: Built-in name of a device or the begin of it (h200), or a hardware file.
        weights: Format of the weights: bf16, fp8, int8, fp4, or mxfp4 for experts alone. Default: as the model is
            published.
        rate: Requests a second. Default: about half of what one engine bears.
    """
    from twin.api.arguments import require_above_0
    from twin.api.starting_scenario import starting_scenario
    from twin.cli.console import note, write_or_print

    require_above_0("--rate", rate)
    text = starting_scenario(model, gpu, weights, rate)
    if output is not None and output.exists():
        raise BadInput("expected a file that is not there yet", field="--output", value=str(output))
    write_or_print(text, output)
    if output is not None:
        note(f"next: twin simulate {output}")
    return 0
