"""Messages, types and rules that all processes share. Nothing here knows torch, Ray or HTTP."""
