"""Rocket Rides: an API of several steps that may be killed at any line. ``make rides`` tells its story."""
