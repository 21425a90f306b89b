"""Publishing: only what was decided, in an order in which a kill at any moment leaves the index whole."""
