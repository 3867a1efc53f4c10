"""``llama-toolkit check-cluster`` in a checkout: ``python -m tools.check_cluster``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["check-cluster", *sys.argv[1:]]))
