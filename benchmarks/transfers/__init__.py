"""Benches of KV transfer, and the worker processes that they need."""
