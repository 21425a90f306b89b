"""The command line: a module for each group of commands, with its options and its calls."""
