"""What machines see of what happens. Nothing here changes what happens."""
