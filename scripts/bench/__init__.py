"""What parts of the router cost, each measured alone or beside others. Every module says what it leaves out."""
