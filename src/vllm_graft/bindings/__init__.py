"""From contracts to the installed vLLM: one module per extension point, fitted by feature test, not by version."""
