"""A server that serves a model, what it states about itself, and the client that asks it."""
