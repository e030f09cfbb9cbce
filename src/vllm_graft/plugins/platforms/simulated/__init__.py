"""The simulated accelerator: vLLM's real engine, scheduler and API server on a device that computes nothing.

A model is its ``config.json`` alone. The scheduler works for real (batching, chunked prefill, prefix caching,
preemption, structured outputs) because the device answers as a real one would; only the tokens are invented, and
always the same ones for the same prompt and seed.

    platform.py    what vLLM asks of a platform: SimulatedPlatform
    worker.py      what the engine drives, step by step: SimulatedWorker
    batch.py       which request of a step is due a token, and which one
    tokens.py      where tokens come from (a seam)
    vocabulary.py  which token ids are ordinary text
    timing.py      when a step ends (a seam)
    memory.py      how much the KV cache may hold
    adapters.py    which LoRA adapters are loaded
    refusals.py    what the device cannot do, and says so
"""
