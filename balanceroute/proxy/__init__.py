"""The live router: an HTTP proxy around the scheduler."""

from balanceroute import native as native  # before the first of its modules: it says whether they are compiled ones
