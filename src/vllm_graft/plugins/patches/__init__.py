"""Patches that ship. Each is off unless a plan names it, and says why it exists and when it can go."""
