"""Decode steps of an AFD bundle: x attention and y FFN instances that serve as one decode engine.

    stages      seconds of one layer's attention, FFN and exchange, from data sheets or a calibration
    step_time   a decode step of these
    spec        the scenario section

Import from the modules: this package loads none of them.
"""
