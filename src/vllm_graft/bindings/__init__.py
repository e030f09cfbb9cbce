"""Bind contracts to the installed vLLM, by feature test rather than version number.

instantiate.py  import a planned item's class and call it
scheduling/     admission queues and scheduling policies: vLLM's scheduler, in engine core
sampling/       samplers: request keys in the front end, logits in the workers
stats.py        stat sinks: vLLM's stat loggers, in the front end
"""
