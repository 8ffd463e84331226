"""Calibrations by name or path, in either of the two file formats.

The formats are α/β lines (`calibration.file_format`), and the file of `twin calibrate run`
(`sources.calibration_file.file_format`), which contains such lines. This module imports both.
"""

from __future__ import annotations

from pathlib import Path

from latency_models.calibration import Calibration
from latency_models.io.config_io import checked, read_yaml
from latency_models.io.files import find_data


def load_calibration(name: str | Path, base: Path = Path()) -> Calibration:
    """Load a built-in calibration by name, or a file by path (relative to `base`); `BadInput` for other files.

    A file of `twin calibrate run` gives the lines that it contains.
    """
    path = find_data("calibrations", name, base)
    document = read_yaml(path)
    if document.get("schema") == "twin.measured-calibration/1":
        from latency_models.sources.calibration_file import from_document  # many classes, seldom needed

        return from_document(document, path).lines()
    return checked(Calibration, document, path)
