"""`python -m runnel.cli.child NODE DESCRIPTOR`: one of the processes that `runnel serve` starts. Not for people."""

from __future__ import annotations

import gc
import sys
from socket import socket

from runnel.cli import diagnostics
from runnel.cli.diagnostics import LogFormat


def main(words: list[str]) -> int:
    """Run the child whose parent is at the other end of the socket with this descriptor."""
    _, descriptor = words  # the name is there for people who list processes
    # Imports create no garbage, and collecting takes a tenth of their time. It begins when the broker serves.
    gc.disable()
    from runnel.processes import child  # takes most of the start

    end = socket(fileno=int(descriptor))
    end.set_inheritable(False)
    launch = child.receive_launch(end)
    if launch is None:
        return 0  # nobody waits for it any more
    node = launch.settings.cluster.node
    diagnostics.configure(LogFormat(launch.log_format), launch.log_level, node=node)
    return child.run_child(end, launch, diagnostics.set_level)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
