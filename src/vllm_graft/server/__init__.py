"""Additions to vLLM's API server.

gate.py            identify the caller and refuse requests, before vLLM reads them
engine_request.py  an HTTP request for the engine, read as far as a queue needs it
callers.py         the file of callers, and their tenant and priority on every request to the engine
body_errors.py     a 400 for bodies that vLLM answers with a 500
status.py          ``GET /graft/status`` and ``GET /graft/samplers``
metrics.py         queue statistics and items on vLLM's ``/metrics``
"""
