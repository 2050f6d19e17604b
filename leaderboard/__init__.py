"""Committed records and, with them, the evidence behind every number that the project shows."""
