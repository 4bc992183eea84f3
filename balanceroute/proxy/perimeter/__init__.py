"""Who may ask for what: the classes of routes, the credentials, the keys of clients. Pure but for reading files."""
