"""Quantisers of linear layers: rounding to nearest, GPTQ and AWQ, at 4, 3 and 2 bits.

grid     codes, scales and zero points
methods  the equations of GPTQ and AWQ
models   a whole model, module by module, and what its linear layers get in a forward pass
"""
