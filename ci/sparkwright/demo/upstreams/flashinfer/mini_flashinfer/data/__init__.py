"""Filled by the build backend."""
