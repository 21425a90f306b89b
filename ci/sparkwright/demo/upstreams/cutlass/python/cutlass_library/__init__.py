"""Names that code generators share with the headers."""

#: The magnitudes of E2M1 in the order of their codes.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
