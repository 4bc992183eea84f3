"""The side of the clients: what comes in, how it is answered, several choices of one request."""
