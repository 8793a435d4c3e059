"""A registered study of the largest stable learning rate on tasks that need depth: see
PROTOCOL.md.
"""
