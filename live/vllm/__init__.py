"""vLLM itself: scheduler classes for its `--scheduler-cls`, and its engine for `twin validate --engine vllm`.

Nothing else imports this package, except a command when it runs. `schedulers`, `engine` and `backend` need vLLM.

settings     of `--additional-config`, and of the process   schedulers   the classes for `--scheduler-cls`
policies     SPEAR's chunks, Prelude's lane                 step_log     the log, and what writes every step to it
engine       vLLM's engine, for replays                     server       its server in a process, profiled and replayed
backend      of a validation, by CPU time or the wall clock
"""
