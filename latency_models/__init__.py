"""Step times: the seconds that a batch takes on an engine, from measurements or specifications.

Nothing in this package runs an engine. Of the other packages it imports `schedulers` (batch types), `workloads.errors`
and `workloads.json_files`.

    step_time      the class that a simulator calls, and `wrapped`: step times made of those of others
    unknowns       what a model does not know exactly, and draws of it
    origin         the device, engine and model of imported timings
    sources/       one file or folder for each source of step times: its scenario section and its model
    interpolation  between measured points
    calibration/   the calibration file (α and β lines), and its fit; `calibration_loader` finds files by name or path
    deployment/    hardware and model specifications, and roofline lines derived from them
    fitting/       estimators: lines, and lines with knees
    io/            YAML and CSV files, and one-line error messages

Import from the modules: this package loads none of them, and reading a calibration loads neither numpy nor scipy.
"""
