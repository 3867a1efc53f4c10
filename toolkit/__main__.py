"""``python -m toolkit COMMAND``: the command ``llama-toolkit`` (``toolkit/cli.py``)."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
