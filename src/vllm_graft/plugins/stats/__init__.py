"""Stat sinks that ship."""
