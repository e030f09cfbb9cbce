"""Samplers that ship: those that other servers have but vLLM does not.

- ``dry``             lowers tokens that would continue a repetition, the more the longer it is
- ``no_repeat_ngram`` forbids tokens that would complete a sequence that was there before
- ``top_n_sigma``     keeps the tokens whose logit is within some standard deviations of the greatest
- ``xtc``             now and then takes away the most probable of several probable tokens
- ``matching``        what the first two share: where the end of a text occurred before in it
"""
