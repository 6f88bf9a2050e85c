"""Experiments: what they cost, how to run them, and what came out."""
