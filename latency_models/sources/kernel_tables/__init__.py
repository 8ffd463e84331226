"""Step times from kernel microbenchmarks, in the format of LLMServingSim 2.0's profiler.

    files      a folder of CSV files, or the one YAML file made of it     tables     their content as data
    grids      measured points, with the holes filled                     attention  decodes, prompts, and both at once
    skew       the cost of decodes of uneven lengths                      layers     everything else in a step
    parallel   settings, and the cost of collectives                      held_out   ranges, errors at points left out
    step_time  the sum of all parts

Import from the modules: this package loads none of them, and `parallel`, which scenarios need, loads no numpy.
"""
