"""Answers before the purchase: plans, verdicts, pictures. docs/planning.md."""
