"""``constrained-json``: answers that are JSON, whatever the model would rather say.

- ``sampler``     the contract: a mask for each request, then a token for each
- ``automaton``   JSON byte by byte, with a stack
- ``in_string``   the part of it inside of strings: escapes and UTF-8
- ``vocabulary``  the bytes that each token stands for
- ``masks``       the tokens that a state allows, found in one walk over the vocabulary as a tree
- ``pick``        a token by temperature, top_k and top_p
"""

from vllm_graft.plugins.samplers.constrained_json.sampler import ConstrainedJSONSampler

__all__ = ["ConstrainedJSONSampler"]
