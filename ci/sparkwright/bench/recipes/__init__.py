"""Recipes: how a model is served on a Spark, what was published of its speed, and the workloads that say whether that holds here."""
