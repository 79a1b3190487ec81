"""The operating system behind small interfaces: `Disk`, `Clock`, `Workers`, listening sockets, TLS, log lines.

Tests replace `Disk`, `Clock` and `Workers`. Read `disk.py` first.
"""
