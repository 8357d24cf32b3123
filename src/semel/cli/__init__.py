"""What operators type. ``main.py`` is the way in; each noun (keys, schema, demo) has a file or a folder of its own."""
