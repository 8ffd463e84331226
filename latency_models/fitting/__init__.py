"""Estimators that fit latency lines to measurements, in scikit-learn's manner."""
