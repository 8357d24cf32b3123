"""Where the application's own transactions come from: one module per driver, each imported when it is asked for."""
