"""Verdicts, the ladder of gates, and what a gate is run on."""
