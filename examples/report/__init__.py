"""A report that takes ten seconds: 202 at once, a progress bar, and a worker that may be killed. ``make report``."""
