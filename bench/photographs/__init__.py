"""Photographs on disk: their sources, preparing and reading them, and eyes that are drawn."""
