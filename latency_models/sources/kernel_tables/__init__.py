"""Step times from kernel microbenchmarks, in the format of LLMServingSim 2.0's profiler."""
