"""No test asks a hub, whether there is one or not: without a network each question is half a minute of retries."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read as huggingface_hub is imported
