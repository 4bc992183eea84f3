"""Metrics, their instruments, logs."""
