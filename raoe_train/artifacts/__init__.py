"""What jobs leave on disk, and what they came from: written whole or not at all, made once, found
again. Knows nothing of encoders."""
