"""One request from its arrival to its end: its lifecycle, both orders of calls, its stream to the client."""
