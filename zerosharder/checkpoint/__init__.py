"""Checkpoints: save, load at any number of ranks, find the newest, export."""
