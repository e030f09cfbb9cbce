"""The simulated accelerator: vLLM's real engine, scheduler and API server on a device that computes nothing.

A model is its ``config.json`` alone. The scheduler works for real (batching, chunked prefill, prefix caching,
preemption, structured outputs) because the device answers as a real one would; only the tokens are invented, and
always the same ones for the same prompt and seed.

    platform.py     what vLLM asks of a platform: SimulatedPlatform
    worker.py       what the engine drives, step by step: SimulatedWorker
    executor.py     one process for all devices of an engine
    batch.py        which requests of a step are due tokens, and from which position on
    tokens.py       the vocabulary, and the tokens by hash (a seam)
    logprobs.py     log probabilities, invented and consistent
    outputs.py      a step's output in vLLM's form, and draft tokens
    memory.py       the size of the KV cache
    refusals.py     what the device cannot do, and says so
    settings.py     what is simulated, and how fast
    devices.py      the devices that can be simulated
    model_shape.py  what a model costs, from its configuration
    roofline.py     how long a device works on a batch
    clock.py        when a step ends: real, sped-up and virtual time (a seam)
    workload/       what arrives when, a player, and a report
"""
