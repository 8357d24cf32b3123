"""Log records and counts of what happens. Nothing here changes what happens."""
