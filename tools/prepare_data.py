"""``llama-toolkit prepare-data`` in a checkout: ``python -m tools.prepare_data``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare-data", *sys.argv[1:]]))
