"""The terms of a run of several nodes: how many, how long they are waited for, how often all start again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.config.types import MAX_RANKS
from toolkit.launcher.environment import environment_error, is_number, whole_number
from toolkit.launcher.supervisor import Launch


@dataclass(frozen=True)
class Terms:
    """Conditions of a run of ``least`` to ``most`` nodes, with times in seconds.

    A node must come within ``join_timeout``; where fewer than ``most`` are enough, the others have
    ``last_call`` from then on. One that is silent for ``node_timeout`` is lost. After a failure all start
    again, at most ``restarts`` times in a row without a new checkpoint. Ranks of a failed round have
    ``ending`` to end.
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


def node_range(environ: Mapping[str, str]) -> tuple[int, int]:
    """The least and the most nodes of NNODES, which is such as 4 or 2:4; 1 where it is unset or empty.

    Raises:
        ConfigError: it is neither.
    """
    text = environ.get("NNODES", "").strip()
    first, colon, last = text.partition(":")
    if not colon:
        nodes = whole_number(environ, "NNODES", 1, 1, MAX_RANKS)
        return nodes, nodes
    least, most = (int(each) if is_number(each.strip()) else 0 for each in (first, last))
    if not 1 <= least <= most <= MAX_RANKS:
        rule = "NNODES is a number of nodes, or the least and the most with a colon between"
        raise environment_error("NNODES", text, rule, "set it to such as 4 or 2:4")
    return least, most


def terms_from(environ: Mapping[str, str], launch: Launch) -> Terms:
    """Read NNODES, MAX_RESTARTS, JOIN_TIMEOUT, LAST_CALL_TIMEOUT and NODE_TIMEOUT.

    Raises:
        ConfigError: a value is no such number.
    """
    least, _ = node_range(environ)
    restarts = 3 if least < launch.nodes else 0
    return Terms(
        least=least,
        most=launch.nodes,
        restarts=whole_number(environ, "MAX_RESTARTS", restarts, 0),
        join_timeout=whole_number(environ, "JOIN_TIMEOUT", 600, 1),
        last_call=whole_number(environ, "LAST_CALL_TIMEOUT", 30, 0),
        node_timeout=whole_number(environ, "NODE_TIMEOUT", 20, 1),
        ending=launch.peer_grace + launch.kill_grace,
    )
