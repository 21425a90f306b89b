"""G7: hours of mixed load."""
