"""The operating system behind small interfaces: `Disk`, `Clock`, `Workers`, listening sockets, TLS, log lines.

Tests replace `Disk`, `Clock` and `Workers`. Read `disk.py` first.
"""

__all__ = [
    "acceptor",
    "addresses",
    "clock",
    "diagnostics",
    "disk",
    "extras",
    "file_systems",
    "heap",
    "listening_socket",
    "lock_holder",
    "port_listener",
    "process",
    "service_manager",
    "signals",
    "tasks",
    "tls",
    "workers",
]
