"""`bin/bench`. Nothing is imported before it runs: each process of a measurement imports this module once more."""

import signal
import sys

if __name__ == "__main__":
    # As an exception, so that what was made is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        from bench.commands import main

        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
