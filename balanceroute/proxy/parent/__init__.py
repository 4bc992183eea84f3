"""What the parent process does: starts the others and watches them, binds and hands over sockets, tries reloads."""
