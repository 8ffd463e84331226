"""Step-time sources, one folder each: `spec.py` is the scenario section, `step_time.py` the model that it builds.

    linear             coefficients stated in the scenario
    kernel_tables      kernel microbenchmarks in LLMServingSim's format
    aiconfigurator     kernel tables of NVIDIA's aiconfigurator
    roofline           data sheets, and what kernels reach of them
    vllm_step_log      a regression on logged steps of vLLM
    engine_regression  a regression on timed steps of the live engine (`twin validate`)
    ec_tables          4-bit models with error compensators (SPEAR 4.3)
    calibration_file   the file of `twin calibrate run`

`recognise.py` tells which source a folder of tables is of.

Import from the modules: this package loads none of them.
"""
