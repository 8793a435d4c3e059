"""A registered trial of checks and of their advice on models and trainings with known faults: see
PROTOCOL.md.
"""
