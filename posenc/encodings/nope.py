"""No explicit position: the causal mask alone breaks the symmetry."""

from __future__ import annotations

from posenc.encodings.base import PositionalEncoding


class NoPE(PositionalEncoding):
    """No positional encoding (Haviv et al., 2022; Kazemnejad et al., 2023)."""

    name = "nope"
    shift_invariant = "exact"
    reference = """@inproceedings{kazemnejad2023impact,
  title={The Impact of Positional Encoding on Length Generalization in Transformers},
  author={Kazemnejad, Amirhossein and Padhi, Inkit and Natesan Ramamurthy, Karthikeyan and
          Das, Payel and Reddy, Siva},
  booktitle={Advances in Neural Information Processing Systems},
  year={2023}
}"""
