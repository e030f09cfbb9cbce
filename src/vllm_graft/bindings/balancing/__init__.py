"""The expert-balancer point: a planned ``ExpertBalancer`` as the policy of vLLM's EPLB.

vLLM picks a policy when it makes the expert maps of a model, from names that its configuration closes by a ``Literal``.
The names stay closed: a patch puts ours in the place of what vLLM picked, with that as its fallback. So asynchronous
rearranging, which vLLM allows with its own policy only, works too.

- ``engine_arguments``  which engines cannot have a balancer
- ``patches``           the place in vLLM where a policy is picked
- ``policy``            what vLLM calls: the guarded balancer, one answer for all ranks, the figures
"""
