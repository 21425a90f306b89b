"""The one signed record from which everything else that is published follows."""
