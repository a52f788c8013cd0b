"""Where the rows of a file are, as the header of each format says."""
