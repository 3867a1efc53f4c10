"""``llama-toolkit train-tokenizer`` in a checkout: ``python -m tools.train_tokenizer``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["train-tokenizer", *sys.argv[1:]]))
