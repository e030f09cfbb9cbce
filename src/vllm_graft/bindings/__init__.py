"""Bind contracts to the installed vLLM, by feature test rather than version number.

Every extension point has a room or module of its own here, and each is built from the same three parts:

- injected: what the front end puts into vLLM's arguments or configuration, so that vLLM itself makes our class. Your
  own value is kept beside ours, or refused by name.
- wrapped: the vLLM class from which ours derives, or patches if vLLM has no argument. Each calls the original.
- proven: ``instantiate`` makes the planned item in the process that runs it and records it as applied or refused;
  ``guard_method`` wraps its methods, so that calls are counted and timed and a failure puts the item aside.

===============  ============  =================================  ======================================  ===========
point            here          injected                           wrapped                                 proven in
===============  ============  =================================  ======================================  ===========
sampler          sampling/     ``arguments.arguments``            ``processor``; ``patches``              workers
scheduler        scheduling/   ``scheduler.set_scheduler_class``  ``scheduler.planned_scheduler``         engine core
attention        attention/    nothing                            ``patches``; ``backends``; ``kernel``   both of these
model            models/       nothing                            vLLM's ``ModelRegistry``; ``patches``   every process
router           routing/      nothing                            ``patches``; ``vllm_router``            workers
expert-balancer  balancing/    nothing                            ``patches``; ``policy``                 workers
stats            stats.py      ``stat_loggers``                   the stat logger class that it returns   front end
===============  ============  =================================  ======================================  ===========

Points without a contract of ours have no room here: a patch is applied by ``patching``, the simulated platform is
vLLM's own ``Platform`` under vLLM's own entry point (``simulator``), and the endpoint is ``server``.

A new point (LoRA resolvers, IO processors, structured output) is a module of its name with the same
three parts, a contract in ``contracts``, a row in ``points`` and one call in ``boot`` that injects it.
"""
