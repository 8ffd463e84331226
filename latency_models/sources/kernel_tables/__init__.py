"""Step times from kernel microbenchmarks, in the format of LLMServingSim 2.0's profiler.

    files      a folder of CSV files, or the one YAML file made of it     tables     what they hold, as data
    grids      measured points, with the holes filled                     attention  decodes, prompts, and both at once
    skew       what decodes of uneven length cost                         layers     everything else in a step
    parallel   settings, and what ranks spend on each other               held_out   ranges, errors at points left out
    step_time  a step from all that

Import from the modules: this package loads none of them, and `parallel`, which scenarios need, loads no numpy.
"""
