"""Patches and picked pull requests: strict application, conflict reports, and upkeep."""
