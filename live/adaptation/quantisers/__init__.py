"""Quantisers of linear layers: rounding to nearest, GPTQ and AWQ, at 4, 3 and 2 bits.

grid     codes, scales and zero points
models   GPTQ and AWQ, and a whole model, module by module, with what its linear layers get
"""
