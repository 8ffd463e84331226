"""Trainings of small models (`twin adapt`): figures of their losses."""
