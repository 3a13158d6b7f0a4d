"""The autoscaling policy, which decides how many workers each role should have. It is pure; `serve_policy.py` and
`decision_watch.py` know Ray."""
