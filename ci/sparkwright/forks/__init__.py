"""Stacks, locks, mirrors, and sources as trees."""
