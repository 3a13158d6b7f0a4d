"""The load generator: it sends a plan's requests through Locust and records the answers."""
