"""Serving and measuring: recipes, models, servers, load, the state of the machine, statistics."""
