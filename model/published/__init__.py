"""Tables of well-known models and GPUs, as their makers published them."""
