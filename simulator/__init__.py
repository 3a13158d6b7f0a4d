"""Serving on virtual time: docs/simulation.md."""
