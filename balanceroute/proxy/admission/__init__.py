"""The waist: the ledger before the scheduler, the dispatchers that act on its decisions, forecasts."""
