#!/usr/bin/env bash
# Sets up and runs the tests; arguments go to pytest (for example: tests/run.sh -k tokenizer, -m slow).
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
python=$("$root/tools/setup.sh" test)
cd "$root"
exec "$python" -m pytest -q --durations=15 "$@"
