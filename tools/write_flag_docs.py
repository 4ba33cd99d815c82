"""Write docs/flags.md from the flag table: `python tools/write_flag_docs.py`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megackpt.config.help import markdown  # noqa: E402

if __name__ == "__main__":
    (ROOT / "docs" / "flags.md").write_text(markdown(), encoding="utf-8")
