"""Changes to a source: patches, their order, and their strict application."""
