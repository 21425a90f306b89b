"""Compiling translation units: ninja, their costs, and what their failures mean."""
