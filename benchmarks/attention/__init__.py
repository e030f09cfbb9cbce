"""What attention over a window costs and frees."""
