"""Verbs, calls, exit codes."""
