"""How long it takes: fitted estimators, roofline derivations and the calibration files that carry them.

May live here: estimators (`fit`, `predict`, and a scalar `seconds` for the hot path), the calibration schema,
hardware and model specifications, importers of others' measurements. May not: anything that runs a plant. Imports
`schedulers` (batch types), `reports.records` and `workloads.errors` at most.

    base           what every estimator shares              linear        t = α·x + β by regression
    calibration    the calibration file                     measurements  from a table of times to a calibration
    hardware       what a device can do                     models        the shapes of a transformer
    roofline       α and β from the two (AFD appendix B)    builtin       the files that come with the package
    pass_latency   the three lines of one pass, bare         (for plants and theory)
    strict         YAML and pydantic, read strictly         faults        what is wrong with a file, in one line

Import from the modules: this package loads none of them, and reading a calibration loads neither numpy nor scipy.
"""
