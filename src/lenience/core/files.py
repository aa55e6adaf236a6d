"""Files that are whole or not there. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError


def read_json(path: Path) -> dict[str, Any]:
    """Raises InputError where the file is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value
    except OSError:
        raise InputError(f"{path}: there is no such file") from None
    except ValueError as error:
        raise InputError(f"{path}: broken ({error}); restore it from a copy or start another folder") from None


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all."""
    new = path.with_suffix(path.suffix + ".new")
    new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)
