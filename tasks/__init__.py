"""Evaluation protocols of posterior-bench, one file each."""
