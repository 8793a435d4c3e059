"""Runs the statements of theory on random cases. Each room has the statements about itself."""
