"""Verifying what strangers hand in, in children with limits."""
