"""Decoders of the Llama and Qwen3 families, with real weights, dense or in 3 and 4 bits.

config      what config.json says            checkpoint  tensors of a directory, by name
packed      AWQ's and GPTQ's linear layers    linear      their product, and rounding of our own
weights     one layer's tensors, fused        decoder     tokens to logits
"""
