"""The command line. ``main.py`` starts it; each noun (keys, schema, demo) has its own file or folder."""
