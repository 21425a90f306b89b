"""A load generator in this process, for tests of what measures with one: sockets, and bytes recorded as they come."""
