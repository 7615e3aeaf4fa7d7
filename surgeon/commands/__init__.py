"""One function for each command: the library's, whose signature is the command line, too."""
