"""A model as its files tell: which modules it has, what they read per token, and the ceiling that follows."""
