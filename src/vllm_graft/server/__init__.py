"""What an API server of vLLM has besides its own routes.

routes.py     ``GET /graft/status`` and ``GET /graft/samplers``; keys.py checks the server's API keys for them
metrics.py    the queues' figures on vLLM's ``/metrics``
gate.py       who asks, and who is turned away, before vLLM reads a request; attaching.py puts it in
asked.py      a request as it comes in
enforcing.py  who asks, written into what the engine is sent
callers.py    the file that says who may ask, and for what
"""
