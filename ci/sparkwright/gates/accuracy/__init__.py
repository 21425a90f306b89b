"""G6: tasks, paired question by question with a baseline."""
