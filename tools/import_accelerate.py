"""``llama-toolkit import-accelerate`` in a checkout: ``python -m tools.import_accelerate``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["import-accelerate", *sys.argv[1:]]))
