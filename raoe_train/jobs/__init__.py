"""The jobs of the command line, a function each."""
