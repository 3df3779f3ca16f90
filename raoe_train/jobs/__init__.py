"""The jobs of the command line. Each job is a function in the module with the same name."""
