"""The tools of a build: toolchain, lock, host and cross compilers, sandbox, compiler cache."""
