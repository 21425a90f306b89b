"""G1: every conversion to and from NVFP4 in the patched sources, without a GPU."""
