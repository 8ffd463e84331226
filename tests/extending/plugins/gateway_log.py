"""A trace format: lines `seconds prompt+answer`, as a gateway might write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from workloads.errors import BadInput
from workloads.traces import TRACE_FORMATS, Trace


@TRACE_FORMATS.register("gateway-log")
def read_gateway_log(file: Path) -> Trace:
    times, prompts, answers = [], [], []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        time, plus, lengths = line.partition(" ")
        if not plus or "+" not in lengths:
            raise BadInput("expected seconds and prompt+answer", value=line, file=file, line=number)
        prompt, answer = lengths.split("+")
        times.append(float(time))
        prompts.append(int(prompt))
        answers.append(int(answer))
    return Trace(file.stem, np.array(times), np.array(prompts), np.array(answers))
