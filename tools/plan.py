"""``llama-toolkit plan`` in a checkout: ``python -m tools.plan``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
