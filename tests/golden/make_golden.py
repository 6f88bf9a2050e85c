"""Write what Hugging Face transformers computes, for tests that run without it.

    python tests/golden/make_golden.py

The arrays in this folder were made with transformers 5.24.0, torch 2.13.0 (CPU) and numpy 2.4.6 on
Python 3.11; every file names the versions that made it under ``versions``. The models and their
weights are those of ``weights.py``; nothing is downloaded.

* ``gpt2.npz``: ``tokens`` and ``logits``, and ``logits64``, computed in float64 throughout.
* ``llama.npz``: ``tokens`` and ``logits``. Its norms, phases and softmax are float32 in any case.
* ``alibi_slopes.npz``: ``heads`` and for each H of them ``slopes_H``, from Bloom.
"""

import pathlib
import platform

import numpy as np
import torch
import transformers
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from weights import CONTEXT, KINDS, peer_model, tokens

FOLDER = pathlib.Path(__file__).parent
SLOPE_HEADS = (*range(1, 17), 20, 25)


def main() -> None:
    """Write the three files."""
    torch.set_num_threads(1)
    versions = np.array(
        [
            f"transformers {transformers.__version__}",
            f"torch {torch.__version__}",
            f"numpy {np.__version__}",
            f"python {platform.python_version()}",
        ]
    )
    for kind in KINDS:
        ids = tokens(f"{kind}.tokens", 2, CONTEXT)
        model = peer_model(kind)
        with torch.no_grad():
            arrays = {"logits": model(torch.from_numpy(ids).long()).logits.numpy()}
            if kind == "gpt2":
                arrays["logits64"] = model.double()(torch.from_numpy(ids).long()).logits.numpy()
        np.savez(FOLDER / f"{kind}.npz", tokens=ids, versions=versions, **arrays)
    slopes = {
        # The tensor is slope times place; at place 1 it is the slope.
        f"slopes_{heads}": build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        for heads in SLOPE_HEADS
    }
    np.savez(
        FOLDER / "alibi_slopes.npz",
        heads=np.array(SLOPE_HEADS),
        versions=versions,
        **{name: value.numpy() for name, value in slopes.items()},
    )


if __name__ == "__main__":
    main()
