"""Compares policies on an emulated cluster in real time: on two cores, in four minutes."""
