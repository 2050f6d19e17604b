"""Inference methods of posterior-bench, one file each."""
