"""File formats: the offset, shape and dtype of the rows, from each format's header."""
