"""Decisions on requests: tickets, the ledger that owns the scheduler, dispatchers, forecasts."""
