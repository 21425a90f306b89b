"""Serving a model from a release: preflight, start, Ray, health, and images."""
