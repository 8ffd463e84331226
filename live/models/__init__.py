"""Decoders of the Llama and Qwen3 families, dense or with weights of 3 and 4 bits, and error compensators.

config      config.json                        checkpoint  the tensors of a directory, by name
packed      AWQ's and GPTQ's linear layers     linear      linear layers, and their rounding and compensators
weights     one layer's tensors, fused         decoder     the forward pass, tokens to logits
"""
