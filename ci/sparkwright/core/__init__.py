"""What every other package builds on: console, errors, processes, git, the store, strict files."""
