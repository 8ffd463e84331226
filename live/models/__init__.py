"""Decoders of the Llama and Qwen3 families, with real weights.

config      what config.json says            checkpoint  tensors of a directory, by name
weights     one layer's tensors, fused        decoder     tokens to logits
"""
