"""The machine that measures: its state, the speed of its memory, and the memory that is left."""
