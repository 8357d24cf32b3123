"""What is true: values and rules without I/O, clock or dice. Order is in ``flows``, storage in ``stores``."""
