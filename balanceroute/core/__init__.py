"""The decision core: pure, without clock, socket, task or logger."""
