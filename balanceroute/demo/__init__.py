"""Policies side by side on an emulated cluster: figures from the running system, on two cores, in four minutes."""
