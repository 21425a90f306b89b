"""A model by its files: its modules, the bytes that a token reads, and the speed that follows."""
