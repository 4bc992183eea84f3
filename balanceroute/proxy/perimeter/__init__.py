"""Access control: classes of routes, credentials, client keys. No I/O except reading files."""
