"""Steps of fixed shapes: padded inputs at fixed addresses, so that a GPU replays a step as one CUDA graph.

capture_sizes    the shapes that steps are padded to     staging         a step's arrays in one buffer
device_buffers   what stays on the device                step            one padded step: run, captured, replayed
executor         batches, run by such steps
"""
