"""The harness that measures how trained models extrapolate: ``python -m eval score | report``."""
