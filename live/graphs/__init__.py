"""Steps of fixed shapes: padded inputs at fixed addresses, so that a GPU replays a step as one CUDA graph.

capture_sizes   the shapes that steps are padded to   buffers        a step's arrays, and what stays on the device
step            one padded step: run, captured, replayed
executor        batches, run by such steps
"""
