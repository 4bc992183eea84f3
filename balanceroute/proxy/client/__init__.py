"""HTTP from clients: connections, requests, responses, requests with several choices."""
