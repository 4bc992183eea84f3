"""The prefillers and decode workers: HTTP to them, their circuits, health, reports, and what is drained."""
