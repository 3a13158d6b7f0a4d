"""What numbers the benches take."""

import argparse


def positive(text: str) -> int:
    """A whole number of at least 1. Raises ArgumentTypeError, which argparse shows with the option's name."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return number
