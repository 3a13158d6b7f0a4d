"""Readers of request traces, a module each format."""
