"""Decisions with error rates: evidence block by block, calibration, and a model of a noisy machine to try them on."""
