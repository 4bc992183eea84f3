"""The clients of docs/clients.md: what each of them needs, where it is installed, and whether its block works."""
