"""Estimators that fit latency lines to measurements, in scikit-learn's manner.

    estimator       the base class and the checks that estimators share
    linear          t = α·x + β with intervals and a held-out error
    broken_line     continuous lines with knots, and their basis functions for a fit
    piecewise       several lines with knees between them
    random_effects  variation between groups of measurements

Import from the modules: this package loads none of them.
"""
