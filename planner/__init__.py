"""What a model costs on a machine, and which fleet serves a load: formulas alone. docs/planning.md."""
