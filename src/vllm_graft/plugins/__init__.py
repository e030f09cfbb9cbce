"""What ships: plugins for the extension points, and patches. Nothing here is active unless a plan names it."""
