"""``llama-toolkit report`` in a checkout: ``python -m tools.report``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
