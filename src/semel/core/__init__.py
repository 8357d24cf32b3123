"""Values and rules, without I/O, clock or random numbers. The order of I/O is in ``flows``, storage in ``stores``."""
