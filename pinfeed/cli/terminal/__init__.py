"""Options and files of the command line, and the text that commands print."""
