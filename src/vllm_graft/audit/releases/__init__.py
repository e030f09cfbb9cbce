"""What a release of vLLM looks like, without installing it.

::

    source = release("0.31.0")                         # what is kept on this machine, else ranges of the wheel
    source.modules()                                   # all of vllm, by their dotted names
    source.read("vllm.v1.core.sched.scheduler").text   # its source; only what is read is fetched

client.py    how a server is asked: pip's own session, or a plain client
settings.py  what pip was told of indexes, proxy and certificates, for the plain client
index.py     Index: which releases there are, and where a wheel lies
remote.py    Remote: a wheel on a server, read by ranges
kept.py      Kept: the cache; release(): the one way to get a release
"""
