"""The KV policies that ship.

sink_window.py     ``sink-window``: the first tokens and a window, on a model with full attention
scored_blocks.py   ``scored-blocks``: a share of a request's blocks, those that draw the most attention
compact_window.py  ``compact-window``: a model's own window, with less work for the kernel
"""
