"""The command-line jobs. Each job is a function in the module with the same name."""
