"""A Ray cluster of several nodes on one machine, each with a raylet of its own: for the demo and the tests."""
