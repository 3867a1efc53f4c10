"""``llama-toolkit chat`` in a checkout: ``python -m tools.chat``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["chat", *sys.argv[1:]]))
