"""Trainings of small real models: what SUN and SPEAR claim about quality is tried here, not only what it costs.

Plain PyTorch. The live engine does not import this package; it loads the model directories that are written here.
"""
