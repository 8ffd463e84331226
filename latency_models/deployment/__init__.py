"""Latency lines derived from specifications of a model, a device and a deployment.

    hardware       a device's FLOP/s, bandwidths and memory
    models         the shapes of a transformer
    hugging_face   a model from a Hugging Face config.json
    capture_sizes  batch sizes of vLLM's CUDA graphs
    roofline       α and β from a model and a device (AFD, appendix B)

Import from the modules: this package loads none of them.
"""
