"""Validation: a live run measured beside its prediction. This package does not import the live engine.

backend        the protocol of a live backend
fitting        a step-time model from profiled steps
recordings     measured requests and steps, kept in the run folder
run            the whole validation, from the first profiling round to the document
compare        errors of metrics and of step times
timeline       requests in the system over time
"""
