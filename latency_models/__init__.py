"""How long it takes: fitted estimators, roofline derivations and the calibration files that carry them.

May live here: estimators (`fit`, `predict`, and a scalar `seconds` for the hot path), the calibration schema,
hardware and model specifications, importers of others' measurements. May not: anything that runs a plant. Imports
`schedulers` (batch types), `reports.records` and `workloads.errors` at most.
"""
