"""Benches of one engine: its speed and accuracy, its step costs, and the limits of its hardware."""
