"""The throughput gate: baseline and candidate, leg by leg, until there is evidence one way or the other."""
