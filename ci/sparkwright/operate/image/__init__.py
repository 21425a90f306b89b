"""Serving images: a published release, installed as a user installs it, in an image that starts its server."""
