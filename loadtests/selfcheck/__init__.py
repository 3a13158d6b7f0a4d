"""The load generator against a server whose every instant is known."""
