"""Plugins that ship for the extension points, and patches. Nothing here is active unless a plan names it."""
