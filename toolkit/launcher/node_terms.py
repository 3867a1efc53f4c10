"""Terms of a multi-node run: number of nodes, waiting times, and number of restarts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.config.types import MAX_SECONDS
from toolkit.launcher.environment import node_range, whole_number
from toolkit.launcher.supervisor import Launch


@dataclass(frozen=True)
class Terms:
    """Conditions of a run of ``least`` to ``most`` nodes; times are in seconds.

    A node must join within ``join_timeout``. If fewer than ``most`` nodes suffice, the others may join within
    ``last_call`` after enough nodes have joined. A node is lost if it is silent for ``node_timeout``. After a
    failure, all nodes restart, at most ``restarts`` times in a row without a new checkpoint. Ranks of a
    failed round have ``ending`` to exit.
    """

    least: int = 1
    most: int = 1
    restarts: int = 0
    join_timeout: float = 600.0
    last_call: float = 30.0
    node_timeout: float = 20.0
    ending: float = 15.0

    @property
    def elastic(self) -> bool:
        return self.least < self.most

    @property
    def asked(self) -> str:
        """The value of NNODES in normal form."""
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)


def terms_from(environ: Mapping[str, str], launch: Launch) -> Terms:
    """Read NNODES, MAX_RESTARTS, JOIN_TIMEOUT, LAST_CALL_TIMEOUT and NODE_TIMEOUT.

    Raises:
            ConfigError: a value is not a valid number.
    """
    least, _ = node_range(environ)
    restarts = 3 if least < launch.nodes else 0
    return Terms(
        least=least,
        most=launch.nodes,
        restarts=whole_number(environ, "MAX_RESTARTS", restarts, 0),
        join_timeout=whole_number(environ, "JOIN_TIMEOUT", 600, 1, MAX_SECONDS),
        last_call=whole_number(environ, "LAST_CALL_TIMEOUT", 30, 0, MAX_SECONDS),
        node_timeout=whole_number(environ, "NODE_TIMEOUT", 20, 1, MAX_SECONDS),
        ending=launch.peer_grace + launch.kill_grace,
    )
