"""How long it takes: fitted estimators, roofline derivations and the calibration files that carry them.

May live here: estimators (`fit`, `predict`, and a scalar `seconds` for the hot path), the calibration schema,
hardware and model specifications, importers of others' measurements. May not: anything that runs a plant. Imports
`schedulers` (batch types), `reports.records` and `workloads.errors` at most.

    base                  what every estimator shares
    linear                t = α·x + β by regression
    regimes               lines that hold only so far: knees
    calibration           the calibration file
    measurements          from a table of times to a calibration
    measured_calibration  the file of `twin calibrate run`
    hardware              what a device can do
    models                the shapes of a transformer
    hugging_face          such a file from a config.json
    roofline              α and β from the two (AFD appendix B)
    builtin               the files that come with the package
    pass_latency          the three lines of one pass, bare (for plants and theory)
    step_time             how long one engine step takes: what the twin asks
    engine_steps          steps of a live engine, learnt (`twin validate`)
    yardsticks            what a machine's pace is told by
    measured_steps        a log of another engine's steps
    kernel_tables         LLMServingSim's microbenchmarks
    aiconfigurator        its kernel tables, and served latency
    ec_tables             4-bit models with compensators (SPEAR 4.3)
    table_files           CSV tables of others, every fault with its line
    strict                YAML and pydantic, read strictly
    faults                what is wrong with a file, in one line

Import from the modules: this package loads none of them, and reading a calibration loads neither numpy nor scipy.
"""
