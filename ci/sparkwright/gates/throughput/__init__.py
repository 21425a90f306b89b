"""G8: throughput, candidate against baseline."""
