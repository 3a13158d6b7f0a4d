"""What to buy, and how to use it: docs/planning.md."""
