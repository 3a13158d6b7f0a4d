"""How many workers of each role there should be. Pure, but for what Ray needs (`serve_policy.py`)."""
