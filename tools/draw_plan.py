"""``llama-toolkit draw-plan`` in a checkout: ``python -m tools.draw_plan``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["draw-plan", *sys.argv[1:]]))
