"""Everything that a GPU has to be asked, in one command, for a machine that is there for half an hour.

    python -m benchmarks.gpu_turn --out DIR --state DIR [--seconds 540] [--stages NAME ...]

stages       what is measured, in the order of its value     runner       runs them as processes, resumes, writes files
environment  versions, clocks, ceilings                      precompile   kernels, in many processes
numbers      kernels at real shapes against float64          nodes        every node of a replayed step
http         streams over HTTP                               variants     other settings of kernels
"""
