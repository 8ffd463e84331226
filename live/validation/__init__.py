"""The live side of `twin validate`: an engine is probed, and workloads are played on it in real time.

prompts   token ids for requests that have only lengths and prefixes
probe     timed steps of every kind, for a step-time model to learn from
pace      how fast the machine is meanwhile
play      a workload at its own times, and what became of every request and step
"""
