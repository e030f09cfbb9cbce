"""The simulated accelerator: vLLM's real engine, scheduler and API server on a device that computes nothing.

A model is its ``config.json`` alone. The scheduler works for real (batching, chunked prefill, prefix caching,
preemption, structured outputs) because the device answers as a real one would; only the tokens are invented, and
always the same ones for the same prompt and seed.

    platform.py    what vLLM asks of a platform: SimulatedPlatform
    worker.py      what the engine drives, step by step: SimulatedWorker
    executor.py    one process for all devices of an engine
    settings.py    what is simulated, and how fast
    devices.py     the devices that can be simulated
    models.py      which model is simulated, and the shapes that ship
    shape.py       what a model costs, from its configuration
    reader.py      the values of a configuration, checked
    weights.py     how many bytes a weight takes
    roofline.py    how long a device works on a batch
    batch.py       which request of a step is due tokens, and from which position on
    answers.py     what a step brings, in the form vLLM takes it
    tokens.py      where tokens come from (a seam)
    lengths.py     how long a text is when nobody cuts it
    logprobs.py    log probabilities, invented and consistent
    drafts.py      draft tokens, and how they are checked
    vocabulary.py  which token ids are ordinary text
    timing.py      when a step ends (a seam)
    memory.py      how much the KV cache may hold
    adapters.py    which LoRA adapters are loaded
    refusals.py    what the device cannot do, and says so
    workload/      what arrives when, a driver that plays it, and what came of it
"""
