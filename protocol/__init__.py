"""What the parts say to each other. Nothing here knows torch, Ray or HTTP."""
