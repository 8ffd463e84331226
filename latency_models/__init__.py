"""Step times: the seconds that a batch takes on an engine, from measurements or specifications.

Nothing in this package runs an engine. Of the other packages it imports `schedulers` (batch types), `workloads.errors`
and `workloads.json_files`. Simulators call `step_time`; `unknowns` is what a model does not know exactly; each source
of step times is a file or folder of `sources/`.

Import from the modules: this package loads none of them, and reading a calibration loads neither numpy nor scipy.
"""
