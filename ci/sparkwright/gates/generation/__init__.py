"""G4: the words that a served model says."""
