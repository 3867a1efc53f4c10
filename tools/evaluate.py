"""``llama-toolkit evaluate`` in a checkout: ``python -m tools.evaluate``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
