"""Tests never contact a model hub: without a network, each request takes half a minute of retries."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read as huggingface_hub is imported
