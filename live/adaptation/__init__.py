"""Trainings of small real models, so that what SUN claims about quality is tried here, and not only what it costs.

The live engine does not import this package; it loads the model directories that are written here. Plain PyTorch:

tasks          sequence operations: prompts and answers     forward        the forward pass with gradients
weights        initial weights, and weights by name         decomposition  SUN's prefill and decode modules (eq. 2 to 6)
tuning         what is trained: all, attention, low rank    quantisation   the decode module in 4 or 3 bits (QSUN)
training       the loop: AdamW, resumable                   recipes        base model, full fine-tuning, prefill-only
directories    model directories, as the engine loads them  sizes          sizes of models and of trainings
runs           one training with its files                  comparison     SUN and what it is compared with, on one task
"""
