"""How trained encodings are made to go on beyond their training length: policies, by name.

A policy acts on the parts of a model's encoding that offer it (``PositionalEncoding.extended``), or
on all of its layers (``Encodings.extend``).
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Literal

from posenc.encodings.options import defaults_of
from posenc.encodings.remapping import REMAPS
from posenc.encodings.scaling import SCALINGS
from posenc.encodings.window import Window


@dataclasses.dataclass(frozen=True)
class Policy:
    """An extension policy.

    Attributes:
        needs: a ``table`` of rows by position, which has to end before the wanted length for the
            policy to do anything; a ``rotation``, which it changes at every length; or ``nothing``.
        summary: what it does, in one sentence.
        options: by name, each with its default; ... where it has none.
        reference: a BibTeX entry.
    """

    needs: Literal["table", "rotation", "nothing"]
    summary: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    reference: str = ""


def _of_class(needs: Literal["table", "rotation", "nothing"], cls: type[Any]) -> Policy:
    summary = (inspect.getdoc(cls) or "").splitlines()[0]
    return Policy(needs, summary, defaults_of(cls), cls.reference)


_DROPE = """@article{gelberg2025extending,
  title={Extending the Context of Pretrained {LLMs} by Dropping Their Positional Embeddings},
  author={Gelberg, Yoav and Eguchi, Koshi and Akiba, Takuya and Cetin, Edoardo},
  journal={arXiv preprint arXiv:2512.12167},
  year={2025}
}"""

POLICIES: dict[str, Policy] = {
    "clamp": Policy("table", "Repeat the last row."),
    "interpolate": Policy("table", "Stretch the whole table linearly over the new length."),
    "wrap": Policy("table", "Start again at row 0."),
    "fresh": Policy("table", "Append new random rows, drawn as at initialisation.", {"seed": 0}),
    **{name: _of_class("rotation", cls) for name, cls in {**SCALINGS, **REMAPS}.items()},
    "window": _of_class("nothing", Window),
    "drop": Policy(
        "nothing",
        "Remove the encoding; with a factor s, multiply logits by (slope ln s + 1)^power.",
        {"factor": None, "slope": 0.1, "power": 1.0},
        _DROPE,
    ),
}
