"""``llama-toolkit plot`` in a checkout: ``python -m tools.plot``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["plot", *sys.argv[1:]]))
