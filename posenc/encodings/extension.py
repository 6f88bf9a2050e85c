"""How trained encodings are made to go on beyond their training length: policies, by name.

A policy acts on the parts of a model's encoding that offer it (``PositionalEncoding.extended``).
"""

from __future__ import annotations

from posenc.encodings.scaling import SCALINGS

# What each policy needs: a table of rows by position, which has to end before the wanted length
# for the policy to do anything; or a rotation, which it changes at every length.
POLICIES: dict[str, str] = {
    **dict.fromkeys(("clamp", "interpolate", "wrap", "fresh"), "table"),
    **dict.fromkeys(SCALINGS, "rotation"),
}
