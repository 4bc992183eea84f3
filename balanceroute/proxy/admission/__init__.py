"""Who decides: tickets of requests, the ledger before the scheduler, the dispatchers, forecasts."""
