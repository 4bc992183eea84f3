"""The decision core: pure, without clock, socket, task or logger."""

from balanceroute import native as native  # before the first of its modules: it says whether they are compiled ones
