"""Measures what Semel costs a web app, on this machine: ``make bench``. No test asserts any of its figures."""
