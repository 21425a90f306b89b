"""What a user's machine does with an index: check it, install from it, look after what is installed, and go back."""
