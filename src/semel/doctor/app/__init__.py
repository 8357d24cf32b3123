"""The application around a store: how it is looked into, and what can be wrong with it."""
