"""Decisions with bounded error rates: evidence block by block, intervals, and a machine's noise."""
