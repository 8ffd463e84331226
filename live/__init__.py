"""The live engine: models, executors, engines and a server, driven by the same `schedulers` as the twin.

This package never imports `twin`. A step, from the outside in:

engine        schedules, launches and commits steps   executor      runs a batch and samples tokens
generation    a request with its output               input_batch   index arrays of the decoding sequences
block_pool    block ids for the scheduler's blocks    speculation   drafts by n-grams, and their verification
clock         wall time, or the run's own CPU time    device        device, memory, threads, copies to the host
loaded_model  a model on a device, and its engines    models/       checkpoints and the forward pass
tokenizer     text to tokens, and back one by one     graphs/       padded steps, CUDA graphs
backend       what a server drives                    server/       the HTTP server
topologies/   several workers: bundles, prefill and decode apart
validation/   replays of workloads, for comparison with predictions
calibration/  measurements of kernels, for predictions
vllm/         vLLM: policies and step logs in its scheduler, and validations of its engine
adaptation/   trainings of small models, and of prefill modules for a shared decode module
"""
