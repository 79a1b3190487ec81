"""Write all generated pages of the documentation, and print which have changed."""

from __future__ import annotations

import sys

from tools.reference.pages import PAGES, ROOT


def main() -> int:
    for path, write in PAGES.items():
        text = write()
        target = ROOT / path
        if target.exists() and target.read_text(encoding="utf-8") == text:
            print(f"{path} is in step")
        else:
            target.write_text(text, encoding="utf-8")
            print(f"{path} was written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
