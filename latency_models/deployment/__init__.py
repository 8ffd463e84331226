"""Latency lines derived from specifications: a model, a device, and how the one is spread over the other.

    hardware       what a device can do: FLOP/s, bandwidths, memory
    models         the shapes of a transformer
    hugging_face   a model from a Hugging Face config.json
    capture_sizes  batch sizes of vLLM's CUDA graphs
    roofline       α and β from a model and a device (AFD, appendix B)

Import from the modules: this package loads none of them.
"""
