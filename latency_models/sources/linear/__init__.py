"""Coefficients that the scenario states."""
