"""A launcher of one node whose ranks train nothing: python -m tests.launcher.node_stand_in SETTINGS FOLDER.

SETTINGS is JSON of `Launch` and `Terms`, of "facts", of "fits", the numbers of nodes that can train, and of
what is "broken" in the data. Ranks leave their place in FOLDER, end with 75 when they are asked to stop, and
with 0 once FOLDER has a file "finish"; where it has "fail" with their host's name, they end with that code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from toolkit.errors import DataError, ToolkitError, report
from toolkit.launcher.node_terms import Terms
from toolkit.launcher.nodes import supervise_nodes
from toolkit.launcher.supervisor import Launch

RANK = """
import os, signal, socket, sys, time
from pathlib import Path

folder, environ = Path(sys.argv[1]), os.environ
stop = folder / f"stop-{environ['MASTER_PORT']}"  # another one in each round: all agree to stop
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda *_: stop.touch())
names = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "MASTER_ADDR")
place = " ".join([socket.gethostname(), *(environ.get(name, "-") for name in names), *sys.argv[2:]])
with open(folder / "places", "a") as file:
    file.write(place + "\\n")
while not (folder / "finish").exists():
    if stop.exists():
        sys.exit(75)
    fail = folder / f"fail-{socket.gethostname()}"
    if fail.exists():
        code = int(fail.read_text())
        fail.unlink()
        print("it fails on purpose", flush=True)
        sys.exit(code)
    time.sleep(0.02)
"""


def main() -> int:
    settings, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    terms = Terms(**settings["terms"])
    launch = Launch(**settings["launch"], nodes=terms.most, peer_grace=0.3, kill_grace=0.3)
    sizes = settings.get("fits", list(range(terms.most + 1)))

    def prepare() -> None:
        if "broken" in settings:
            raise DataError(settings["broken"])

    try:
        return supervise_nodes(
            [sys.executable, "-S", "-c", RANK, str(folder)],
            launch,
            terms,
            settings.get("facts", {}),
            prepare,
            None,
            lambda nodes: [f"mesh-{nodes}"] if nodes in sizes else None,
            lambda: len(list(folder.glob("step-*"))),
            lambda nodes, known: "nobody knows who hangs",
        )
    except ToolkitError as error:
        return report(error, show=True)


if __name__ == "__main__":
    sys.exit(main())
