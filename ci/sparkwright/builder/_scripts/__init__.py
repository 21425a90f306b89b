"""Scripts that other interpreters run, with the standard library only."""
