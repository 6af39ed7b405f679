"""Torch-Pruning beside our pruning: its environment, what runs there, the conversion and the search of its settings."""
