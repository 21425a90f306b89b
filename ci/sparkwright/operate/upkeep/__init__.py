"""Upkeep that runs by itself: one issue that tells of drift, and pull requests that bump a fork."""
