"""Kinds of arguments that several commands take."""

import argparse
import math


def count(text: str) -> int:
    """A whole number from 1. Raises: ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted is a whole number from 1")
    return int(text)


def positive(text: str) -> float:
    """A number above 0. Raises: ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted is a number above 0")
    return number
