"""The jobs of the command line, one function per job."""
