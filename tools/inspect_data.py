"""``llama-toolkit inspect-data`` in a checkout: ``python -m tools.inspect_data``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["inspect-data", *sys.argv[1:]]))
