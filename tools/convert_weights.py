"""``llama-toolkit convert`` in a checkout: ``python -m tools.convert_weights``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
