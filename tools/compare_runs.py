"""``llama-toolkit compare-runs`` in a checkout: ``python -m tools.compare_runs``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["compare-runs", *sys.argv[1:]]))
