"""What runs: one folder an operation, a torch reference beside its Triton kernel.

    rms_norm  rope_kv_write  silu_mul            what is memory alone
    decode_attention  prefill_attention          over a paged cache         kv_blocks   its blocks, for transfer
    w4_gemm  error_compensator  ec_tail          4-bit weights, and SPEAR's correction of them
    expert_gemm                                  mixtures of experts        sampling    logits to tokens
    microbenchmark  ahead_of_time  shipping  shapes    how they are timed, and compiled where there is no GPU

This file stays empty of names, since transformers looks for a package that is called like this one: dispatch lives in
each operation's folder. Imports nothing internal.
"""
