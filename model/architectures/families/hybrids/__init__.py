"""Families whose layers keep a state instead of keys and values, but for some that attend."""
