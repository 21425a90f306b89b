"""Serving a model from a release: preflight, start, other machines, health, and images."""
