"""The machine that measures: its state before and after each leg, how fast its memory is, and the watch over what is left of it."""
