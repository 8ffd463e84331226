"""Step times from data sheets: a model, a device, and the shares of its peaks that kernels reach.

    placement   a model over the devices of an engine, and the formats of its numbers
    efficiency  what kernels reach, fitted to tables of measured ones
    work        FLOPs and bytes of the kernels of one step
    memory      weights and KV cache of a device
    step_time   a step from these
    engines     what a planner asks: step times, memory and cache of an engine, or why there is none
    fitting     the fit of what kernels reach
    spec        the scenario section

Import from the modules: this package loads none of them.
"""
