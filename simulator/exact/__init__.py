"""Event by event: real routers and workers, with engines that only take time."""
