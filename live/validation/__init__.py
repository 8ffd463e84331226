"""The live side of `twin validate`: profiles an engine, and replays workloads on it in real time.

prompts        token ids for requests that have only lengths and shared prefixes
clock          the clock of a timed run
replay         requests at their arrival times, and the times of every token and step
profiling      timed steps of random requests, for fitting a step-time model
machine_speed  optional: speed probes between steps
backend        one model and its engines, with all of the above
"""
