"""What leaves for the user's machine, and what is done there."""
