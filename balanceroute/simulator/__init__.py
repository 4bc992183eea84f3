"""The step simulator: a whole trace in seconds through the very scheduler of the proxy."""
