"""The sampler point: planned samplers as one logits processor that both of vLLM's model runners accept.

- ``injection``  the engine arguments, and what an engine cannot have
- ``requests``   in the front end: keys, bad values, names that are close to one of ours
- ``processor``  the class vLLM is given: the V1 runner's batch index moves, the V2 runner's slot stays
- ``mux``        in the worker: which requests are whose, and the stages of a step
- ``planned``    one planned sampler, guarded and metered
- ``isolation``  a strategy's own rows as a copy, and what of it goes back into the logits
- ``steps``      what a step offers behind ``Rows``: positions, randomness, history
- ``truncation`` statistics of rows, and the one pass that takes away what is below a limit
- ``places``     the few places in vLLM where a processor alone cannot stand
- ``failures``   a request that ends because its sampler raised
"""
