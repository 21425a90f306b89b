"""Gates: a ladder of checks from the bytes of a wheel to the words of a model that it serves."""
