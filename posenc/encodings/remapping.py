"""Ways to keep a trained rotation's distances within those it was trained on, at evaluation.

Each gives keys nearer than a window their own distance and all others one that stays small: a
query's and a key's *far* positions, whose difference is turned by instead.
"""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Num

from posenc.encodings.base import EncodingError


class Remap:
    """A way to replace far distances.

    Attributes:
        name: how ``--extend`` calls it.
        window: distances below it are their own.
        logn: whether queries at position p are multiplied by ``max(1, ln(p + 1) / ln L)``, L the
            length that the model is built for.
        reach: as an encoding's; None is all slots.
        sinks: as an encoding's.
        reference: a BibTeX entry.
    """

    name: ClassVar[str] = "remap"
    reference: ClassVar[str] = ""

    window: float
    logn: bool = False
    reach: int | None = None
    sinks: int = 0

    def _require(self, **least: tuple[float, float]) -> None:
        for option, (value, limit) in least.items():
            if not value >= limit:
                raise EncodingError(f"{self.name}({option}={value}): it must be at least {limit:g}")

    def far(
        self, queries: Num[Array, "B t"], keys: Num[Array, "B S"]
    ) -> tuple[Num[Array, "B t"], Num[Array, "B S"]]:
        """Give the far positions of both sides; their own, if no way says otherwise."""
        return queries, keys


class SelfExtend(Remap):
    """Far positions in groups: ``floor(p_i / G) + W - W/G`` and ``floor(p_j / G)``.

    Jin et al., 2024. ``W/G`` is not rounded, as in the released code for prompts.

    Args:
        group: G.
        window: W.
        logn: as an option of the released code.
    """

    name = "self_extend"
    reference = """@inproceedings{jin2024llm,
  title={{LLM} Maybe {LongLM}: {SelfExtend} {LLM} Context Window Without Tuning},
  author={Jin, Hongye and Han, Xiaotian and Yang, Jingfeng and Jiang, Zhimeng and Liu, Zirui and
          Chang, Chia-Yuan and Chen, Huiyuan and Hu, Xia},
  booktitle={International Conference on Machine Learning},
  year={2024}
}"""

    def __init__(self, *, group: int, window: int, logn: bool = False):
        self._require(group=(group, 1), window=(window, 1))
        self.group, self.window, self.logn = group, window, logn

    def far(self, queries, keys):
        """Count groups."""
        past = self.window - self.window / self.group
        grouped = [jnp.floor_divide(p, self.group).astype(jnp.float32) for p in (queries, keys)]
        return grouped[0] + past, grouped[1]


_REROPE = """@misc{su2023rerope,
  title={Rectified Rotary Position Embeddings},
  author={Su, Jianlin},
  howpublished={Software, bojone/rerope},
  year={2023}
}"""


class ReRoPE(Remap):
    """All distances beyond the window are the window's: ``min(p_i - p_j, w)`` (Su, 2023).

    Args:
        window: w.
        logn: on, as in the released code.
    """

    name = "rerope"
    reference = _REROPE

    def __init__(self, *, window: float, logn: bool = True):
        self._require(window=(window, 1))
        self.window, self.logn = window, logn

    def far(self, queries, keys):
        """Give one distance to all."""
        return (
            jnp.full(queries.shape, self.window, jnp.float32),
            jnp.zeros(keys.shape, jnp.float32),
        )


class LeakyReRoPE(Remap):
    """Distances beyond the window grow k times more slowly: ``w + (p_i - p_j - w) / k`` (Su, 2023).

    Args:
        window: w.
        k: how much more slowly.
        logn: on, as in the released code.
    """

    name = "leaky_rerope"
    reference = _REROPE

    def __init__(self, *, window: float, k: float, logn: bool = True):
        self._require(window=(window, 1), k=(k, 1))
        self.window, self.k, self.logn = window, k, logn

    def far(self, queries, keys):
        """Slow down, counting from the first row: exact for integers."""
        origin = queries[:, :1]
        near = [(p - origin).astype(jnp.float32) for p in (queries, keys)]
        return near[0] / self.k + self.window * (1 - 1 / self.k), near[1] / self.k


class LMInfinite(Remap):
    """Only the first and the nearest keys are seen, distances capped (Han et al., 2024).

    A query sees its own and the ``n_local - 1`` slots before it, and the first ``n_global`` ones of
    its segment; a distance of more than ``limit`` is ``limit``.

    Args:
        n_global: 10 to 100 in the released code.
        n_local: the length of pre-training there.
        limit: ``n_local`` unless told otherwise.
        logn: off, as in the paper.
    """

    name = "lm_infinite"
    reference = """@inproceedings{han2024lm,
  title={{LM-Infinite}: Zero-Shot Extreme Length Generalization for Large Language Models},
  author={Han, Chi and Wang, Qifan and Peng, Hao and Xiong, Wenhan and Chen, Yu and Ji, Heng and
          Wang, Sinong},
  booktitle={Conference of the North American Chapter of the Association for Computational
             Linguistics},
  year={2024}
}"""

    def __init__(
        self, *, n_local: int, n_global: int = 10, limit: int | None = None, logn: bool = False
    ):
        limit = n_local if limit is None else limit
        self._require(n_local=(n_local, 1), n_global=(n_global, 0), limit=(limit, 1))
        self.window, self.logn = limit, logn
        self.reach, self.sinks = n_local - 1, n_global

    def far(self, queries, keys):
        """Give the limit to all."""
        return (
            jnp.full(queries.shape, self.window, jnp.float32),
            jnp.zeros(keys.shape, jnp.float32),
        )


REMAPS: dict[str, type[Remap]] = {
    cls.name: cls for cls in (SelfExtend, ReRoPE, LeakyReRoPE, LMInfinite)
}
