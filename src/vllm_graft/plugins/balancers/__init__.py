"""The expert balancers that ship.

stock.py         ``stock-balancer``: vLLM's own policy, metered
fewest_moves.py  ``fewest-moves``: as even as vLLM's own policy, with as few experts moved as it finds
"""
