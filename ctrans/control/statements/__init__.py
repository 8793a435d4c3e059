"""Statements about the control problem, as tests on random cases."""
