"""Compute kernels: one folder for each operation, with a PyTorch reference beside the Triton kernel.

    rms_norm  rope_kv_write  silu_mul            element-wise, memory-bound
    decode_attention  prefill_attention          over a paged cache
    w4_gemm  error_compensator  ec_tail          4-bit weights, and SPEAR's correction of them
    expert_gemm                                  mixtures of experts        sampling    logits to tokens
    dispatch                                     between reference and kernel, by device
    cases  microbenchmark  ahead_of_time  shipping  shapes    timing, and compilation without a GPU

This file defines no names, since transformers looks for a package of the same name. Imports nothing internal.
"""
