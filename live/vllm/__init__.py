"""vLLM itself: scheduler classes for its `--scheduler-cls`, and its engine for `twin validate --engine vllm`.

Nothing else imports this package, except a command when it runs. `schedulers` and `engine` need vLLM.

settings     of `--additional-config`                 schedulers   the classes for `--scheduler-cls`
recording    a step log: every batch and its time      step_log     the file
chunking     SPEAR's chunks under an ITL goal          one_shot     Prelude's lane for one-shot requests
scheduled    the work of one step of vLLM             engine       vLLM's engine, for replays
"""
