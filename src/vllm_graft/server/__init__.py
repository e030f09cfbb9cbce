"""What an API server of vLLM serves besides its own routes: ``GET /graft/status``."""
