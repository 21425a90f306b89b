"""The lab: the check that no stranger reaches its runner."""
