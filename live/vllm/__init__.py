"""vLLM itself: scheduler classes for its `--scheduler-cls`, and its engine for `twin validate --engine vllm`.

Nothing else imports this package, except a command when it runs. `schedulers`, `engine` and the backends need vLLM.

settings     of `--additional-config`             schedulers       the classes for `--scheduler-cls`
recording    writes every step to a log           step_log         the file
policies     SPEAR's chunks, Prelude's lane       environment      variables of a process that runs vLLM
engine       vLLM's engine, for replays           backend          of a validation by CPU time
server       vLLM's server in a process           server_backend   of a validation by the wall clock
server_runs  profiles and replays of a server
"""
