"""Differences between methods, their ranks, and the board's data."""
