"""
CMake architecture lists: rules that correct them, the plan that a real configure gives, and why a
unit has its architecture.
"""
