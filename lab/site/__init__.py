"""Build the site and what belongs to it: what the Makefile calls."""
