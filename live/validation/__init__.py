"""The live side of `twin validate`: profiles an engine, and replays workloads on it.

profiling    timed steps of random requests, for fitting a step-time model
backend      one model and its engines: requests and sessions at their arrival times, the times of every token and step
fleet        an autoscaled fleet of engines
pools        prefill and decode engines: their steps, the work between them, and a profiling of their own
bundle       an AFD bundle with its slots kept full
"""
