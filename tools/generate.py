"""``llama-toolkit generate`` in a checkout: ``python -m tools.generate``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
