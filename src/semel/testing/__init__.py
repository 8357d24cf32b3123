"""What your tests import, and ours. Nothing in production code does."""
