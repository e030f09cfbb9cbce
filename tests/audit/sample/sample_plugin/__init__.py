"""A plugin that leans on vLLM in every way that an audit has to find. It is read, never run."""
# ruff: noqa
