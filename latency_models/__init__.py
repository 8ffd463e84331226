"""Step times: the seconds that a batch takes on an engine, from measurements or specifications.

This package holds step-time models, estimators, the calibration file, and hardware and model specifications. Nothing
in it runs an engine. Of the other packages it imports `schedulers` (batch types), `workloads.errors` and
`workloads.json_files`.

    step_time      the protocol that a simulator calls
    origin         the device, engine and model of imported timings
    sources/       one folder for each source of step times: its scenario section and its model
    interpolation  between measured points
    calibration/   the calibration file (α and β lines), and its fit
    calibration_loader
                   calibrations by name or path
    deployment/    hardware and model specifications, and roofline lines derived from them
    fitting/       estimators: lines, and lines with knees
    io/            YAML and CSV files, and one-line error messages
    pass_latency   the three lines of one pass through an AFD bundle, as plain numbers
    speed_probes   readings of a machine's current speed

Import from the modules: this package loads none of them, and reading a calibration loads neither numpy nor scipy.
"""
