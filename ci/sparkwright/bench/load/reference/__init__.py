"""A server whose times are known: what a load generator says is held against it before anything is measured."""
