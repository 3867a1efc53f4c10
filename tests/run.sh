#!/usr/bin/env bash
# Sets up and runs the tests, a process a core (at most four), each with one thread; arguments go to pytest,
# for example: tests/run.sh -k tokenizer, -m slow, or -n 0 --pdb in this process.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
python=$("$root/tools/setup.sh" test)
cd "$root"
processes=$(nproc 2>/dev/null || echo 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # threads of two processes on the same cores wait for one another
exec "$python" -m pytest -q -n "$((processes < 4 ? processes : 4))" --dist loadfile --no-loadscope-reorder \
  --max-worker-restart 0 --durations=15 "$@"
