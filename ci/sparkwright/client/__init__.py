"""The client of a release index: everything that a machine needs to install and check releases."""
