"""Kinds of arguments that several commands take."""

import argparse


def count(text: str) -> int:
    """A whole number from 1. Raises: ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted is a whole number from 1")
    return int(text)
