"""Serving a model with an installed set: what is asked, whether it fits here, the server while it loads and runs, and how it fares."""
