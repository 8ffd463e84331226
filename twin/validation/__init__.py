"""Validation: a live run measured and compared with its prediction. This package does not import the live engine.

backend         protocols of live backends: engines, pools and bundles
fitting         a step-time model from profiled steps
recordings      measured requests, steps and stretches, kept in the run folder
run             engines and pools: from the first profiling round to the document
bundle_run      the same for a bundle
compare         errors of metrics and of step times, and requests in the system over time
bundle_compare  errors of bundles, ratio by ratio
coverage        intervals of the forecast, and how often they hold
contention      other programs that disturb the measurement
"""
