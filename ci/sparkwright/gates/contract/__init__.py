"""G3: the kernels and settings that serve."""
