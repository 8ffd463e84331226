"""Step times and served latency from the kernel tables that ai-dynamo/aiconfigurator publishes.

    layout       the files of a set of tables
    tables       kernel timings
    model_format the format of a model's weights
    kernels      one model's kernels on one rank, as curves
    step_time    a step from these curves
    closed_loop  TTFT and TPOT of a client that keeps a number of requests in flight
    silicon      measured TTFT and TPOT
    regression   corrections for times that kernel tables leave out, fitted to measured TPOT
    spec         the scenario section

Import from the modules: this package loads none of them.
"""
