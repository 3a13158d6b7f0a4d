"""Costs of a model on given hardware: rooflines, capacities, published numbers, and their pictures."""
