"""What an API server of vLLM serves besides its own: the routes under ``/graft``, the queues on ``/metrics``."""
