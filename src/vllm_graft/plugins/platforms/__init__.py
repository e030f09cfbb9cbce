"""Platforms that ship with the package: a simulated accelerator."""
