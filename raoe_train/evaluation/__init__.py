"""What an encoder is worth: tasks of several kinds."""
