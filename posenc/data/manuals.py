"""The extraction of `manuals` from the package botocore."""

from __future__ import annotations

import gzip
import html
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from posenc.errors import UserError

VERSION = "1.43.11"

# What the figure of 44,137,450 bytes settles about the recipe (each other reading misses it):
# - the service's own documentation has a name before it too, its `serviceFullName`;
# - a documentation string that is there but cleans to nothing keeps its line, "Name: ";
# - lines without text vanish, but a line's leading blank stays: it is collapsed, not stripped;
# - no-break spaces are text, not blanks to collapse.
_BREAK = re.compile(r"</(?:p|li|dt|dd|note|important|ul|h[1-6])>|<br */?>")
_TAG = re.compile(r"<[^>]+>")
_EMPTY_LINES = re.compile(r"\n\s*\n")
_BLANKS = re.compile(r"[ \t]+")


def clean(documentation: str) -> str:
    """Turn a documentation string (HTML) into plain text, one paragraph a line."""
    text = _TAG.sub("", _BREAK.sub("\n", documentation))
    text = _EMPTY_LINES.sub("\n", html.unescape(text))
    return _BLANKS.sub(" ", text).strip()


def extract() -> dict[str, bytes]:
    """Read every service's documentation: service name -> text in UTF-8, in sorted order.

    Raises:
        UserError: botocore is not installed, or is another version than the pinned one.
    """
    try:
        botocore = import_module("botocore")
    except ImportError:
        raise UserError(
            f"the corpus 'manuals' is read from botocore {VERSION}, which is not installed: "
            "pip install 'posenc[corpus]'"
        ) from None
    if botocore.__version__ != VERSION:
        raise UserError(
            f"the corpus 'manuals' is defined by botocore {VERSION}, but {botocore.__version__} is "
            "installed: pip install 'posenc[corpus]'"
        )
    data = Path(str(botocore.__file__)).parent / "data"
    texts = {}
    for folder in sorted(path for path in data.iterdir() if path.is_dir()):
        if files := sorted(folder.glob("*/service-2.json.gz")):
            service = json.loads(gzip.decompress(files[-1].read_bytes()))
            texts[folder.name] = "\n".join(_lines(service)).encode()
    return texts


def _lines(service: dict[str, Any]) -> list[str]:
    lines = []

    def add(name: str, item: dict[str, Any]) -> None:
        if item.get("documentation"):
            lines.append(f"{name}: {clean(item['documentation'])}")

    add(service["metadata"]["serviceFullName"], service)
    for kind in ("operations", "shapes"):
        for name, item in sorted(service.get(kind, {}).items()):
            add(name, item)
            for member, value in item.get("members", {}).items():
                add(f"{name}.{member}", value)
    return lines
