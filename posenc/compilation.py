"""JAX's persistent compilation cache."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from posenc.data import cache_folder


def keep_compiled() -> Path:
    """Turn on the persistent compilation cache and say where it is.

    The user's ``JAX_COMPILATION_CACHE_DIR`` is kept, where it is set.
    """
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_folder() / "compiled")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small models compile many small programs: keep whatever took a while together.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    return folder
