"""``llama-toolkit checkpoint`` in a checkout: ``python -m tools.checkpoint``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["checkpoint", *sys.argv[1:]]))
