"""A Spark that takes jobs of a repository: set up, checked, one job at a time, clean afterwards."""
