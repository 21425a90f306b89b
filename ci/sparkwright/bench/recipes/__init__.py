"""Recipes: how a model is served, the workloads that it is measured with, and published results."""
