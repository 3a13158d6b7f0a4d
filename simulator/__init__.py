"""Serving on virtual time: docs/design/simulation.md."""
