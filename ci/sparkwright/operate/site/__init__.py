"""
The site: static pages about releases, speeds, patch debt, drift and nights, made of records alone; and the record of a night.

Nothing is believed that a signature or a hash does not cover, and what cannot be checked is shown as such.
"""
