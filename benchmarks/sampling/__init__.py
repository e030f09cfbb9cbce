"""What samplers cost."""
