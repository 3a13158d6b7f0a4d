"""Sizes of layers that model/config.py puts together. No torch here."""
