"""The sampler point: planned samplers as one logits processor that both of vLLM's model runners accept.

A request's keys are read and checked in the front end (``requests``, called by the ``patches`` of vLLM's request
classes), and travel in its sampling parameters. In the worker vLLM makes the ``processor``: a ``ProcessorV1`` or
``ProcessorV2``, which follows the runner's batch and hands each step's logits to the ``pipeline``. There each
``guarded`` sampler reads the keys of the requests that enter and works on its rows, in place or in ``isolation``.

- ``engine_arguments``  what the engine's arguments need, and which engines cannot have samplers
- ``requests``        request keys in the front end: bad values, misspelt names, samplers that cannot be used
- ``patches``         the places in vLLM that a logits processor alone cannot reach
- ``processor``       the class that vLLM is given, and what its two forms share
- ``processor_v1``    the V1 runner: a batch index that moves
- ``processor_v2``    the V2 runner: a slot that stays, tokens on the device
- ``pipeline``        the samplers of a worker, the requests of each, the stages of a step
- ``guarded``         one sampler, its requests, its methods guarded and metered
- ``isolation``       copies of rows for strategies of other packages
- ``step``            what a step offers behind ``Rows``: positions, random numbers, history
- ``failures``        requests that end because their sampler raised
- ``triton_kernels``  kernels of ``step`` and ``isolation``; those that authors may use are in ``contracts.kernels``
"""
