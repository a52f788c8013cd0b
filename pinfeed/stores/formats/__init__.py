"""File formats: the layout of the rows of a file, according to its header."""
