"""Make ``python -m raoe_train`` run the command ``raoe-train``."""

import sys

from raoe_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
