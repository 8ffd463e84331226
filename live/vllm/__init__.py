"""vLLM itself: scheduler classes for its `--scheduler-cls`, and its engine for `twin validate --engine vllm`.

Nothing else imports this package, except a command when it runs. `schedulers` and `backend` need vLLM.

settings     of `--additional-config`, and of the process   schedulers   the classes for `--scheduler-cls`
policies     SPEAR's chunks, Prelude's lane                 step_log     the log, and what writes every step to it
backend      of a validation, in this process or a server   server       its server in a process, profiled and replayed
"""
