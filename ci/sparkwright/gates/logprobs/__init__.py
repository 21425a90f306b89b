"""G5: the distributions behind the words, against a reference."""
