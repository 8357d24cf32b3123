"""In what order things happen: generators that ask for I/O by yielding commands. They do none themselves."""
