"""What is said of a wheel under signature, and whether it holds: made by whoever publishes, checked offline by whoever installs."""
