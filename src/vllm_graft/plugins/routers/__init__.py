"""Routers that ship.

expert_mask.py  ``expert-mask``: no token goes to some of the experts
"""
