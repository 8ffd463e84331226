"""Others' kernel tables, and served latency from them: the published data of ai-dynamo/aiconfigurator.

    curves       straight lines between measured points         tables      a folder of kernel timings
    kernels      one model's kernels on one rank, as curves     step_time   a step from them
    closed_loop  TTFT and TPOT of a client that keeps so many requests in flight
    silicon      measured TTFT and TPOT                         regression  what kernel tables leave out, learnt

Import from the modules: this package loads none of them.
"""
