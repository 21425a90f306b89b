"""G2: the same arithmetic on the GPU at hand, and the kernels and operators of a wheel."""
