"""Prefillers and decode workers: connections, circuits, health, metrics, drains."""
