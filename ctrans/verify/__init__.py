"""Runs every statement of theory on random cases; the statements stand in the rooms that they are
about.
"""
