"""What upstream, which commit: intent, lock, sources and their trees."""
