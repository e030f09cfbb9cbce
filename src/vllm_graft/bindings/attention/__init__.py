"""The attention point: a planned ``KVPolicy`` or ``AttentionKernel`` in every attention layer of the model.

By ``patches``, each attention layer of vLLM asks the planned item about itself (``layers``). A layer with a window gets
two things: another KV-cache spec, whose manager in engine core frees the blocks that have left the window
(``retention``); and a backend derived from the one that vLLM chose, whose metadata builder hands the stock kernel a
block table without those blocks (``backends``, by the arithmetic of ``compaction``). A policy that evicts blocks by
other rules is asked by the manager itself. A kernel takes the place of the stock one: it is passed to the constructor
of every layer (``kernel_layers``), as a vLLM backend (``kernel``).

- ``engine_arguments``  which engines cannot have a planned item
- ``requests``    a policy's request keys, checked in the front end
- ``patches``     the places in vLLM where layers and managers ask
- ``layers``      what each layer gets, refused or proven
- ``retention``   KV-cache specs and managers: what is freed, and what the prefix cache may answer
- ``eviction``    the manager that asks a policy which blocks to free, and the block tables that follow
- ``scoring``     the attention that blocks draw, for a policy that wants scores
- ``freed_block_check``  a debug check that no freed block is read
- ``compaction``  the rows of a step rewritten: which blocks each query sees, as block tables
- ``token_tables``  a model's own window as a table of tokens, for FlashAttention 3
- ``backends``    stock backends with a metadata builder that compacts
- ``kernel``      an ``AttentionKernel`` as a vLLM backend
- ``kernel_layers``  the layers that get it, refused or proven
- ``kernel_trial``   its trial at the start
"""
