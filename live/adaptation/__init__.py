"""Trainings of small real models: what SUN and SPEAR claim about quality is tried here, not only what it costs.

The live engine does not import this package; it loads the model directories that are written here. Plain PyTorch:

tasks          sequence operations: prompts and answers     forward        the forward pass with gradients
weights        initial weights, and weights by name         decomposition  SUN's prefill and decode modules (eq. 2 to 6)
tuning         what is trained: all, attention, low rank    quantisation   the decode module in 4 or 3 bits (QSUN)
training       the loop: AdamW, resumable                   recipes        base model, full fine-tuning, prefill-only
directories    model directories, as the engine loads them  sizes          sizes of models and of trainings
runs           one training with its files                  comparison     SUN and what it is compared with, on one task
study          the jobs of a study over tasks and seeds     served         tuned modules behind the HTTP server
small_config   the config of every model here

text/          language models of Python's sources          quantisers/    RTN, GPTQ and AWQ, at 4, 3 and 2 bits
compensation/  error compensators of quantised models (SPEAR)
"""
