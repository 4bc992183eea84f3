"""The live router: an HTTP proxy around the scheduler."""
