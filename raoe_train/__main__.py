"""Run the command ``raoe-train`` as ``python -m raoe_train``."""

import sys

from raoe_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
