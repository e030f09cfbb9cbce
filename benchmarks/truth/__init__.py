"""Measures the audit against the real vLLM.

corpus.py    packages from the package index, pinned, unpacked into the cache folder
collect.py   every use of vLLM in a package, read from its syntax trees without code of the audit
guards.py    conditions and ``try`` statements around a use: does that code run on this release
oracle.py    decides a use by running vLLM: import, getattr, bind the call, build the class
upstream.py  what vLLM's own sources call and store, for what no signature tells
verdicts.py  the words for a decision
decided.py   the decided uses, kept between runs
compare.py   the decided uses beside the audit's findings: recall, precision, misses, false alarms
"""
