"""Console, errors, processes, HTTP, git, the store and strict files, for all other packages."""
