"""Load on a server: what is ordered, the programs that make it, and the proof that they measure right."""
