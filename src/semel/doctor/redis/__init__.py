"""Redis as a store: how it is asked, and what can be wrong with it."""
