"""One request from its arrival to its end: its lifecycle, both orders of calls, the relay of its stream."""
