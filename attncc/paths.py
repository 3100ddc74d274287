"""Where attncc keeps what it makes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """ATTNCC_CACHE_DIR, else ~/.cache/attncc; the environment is read at every call."""
    named = os.environ.get("ATTNCC_CACHE_DIR")
    return Path(named) if named else Path.home() / ".cache" / "attncc"
