"""G3: a server that serves a model, what it says of itself, and the client that asks it."""
