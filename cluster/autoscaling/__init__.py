"""How many workers of each role there should be. Pure; `serve_policy.py` and `decision_watch.py` know Ray."""
