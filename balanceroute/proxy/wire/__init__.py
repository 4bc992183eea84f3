"""The bytes and JSON of both sides, without I/O: request bodies, event streams, answers, connectors' parameters."""
