"""The live side of `twin validate`: profiles an engine, and replays workloads on it.

clients          requests with made-up token ids, and sessions
replay           requests at their arrival times, and the times of every token and step
profiling        timed steps of random requests, for fitting a step-time model
role_steps       steps of a topology's engines, and the work between them
pools_profiling  the same as profiling, in a topology of prefill and decode engines
backend          one model and its engines, with all of the above
"""
