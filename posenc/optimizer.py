"""The optimiser of a run: AdamW, its schedule, and what decays."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import optax
from flax import nnx

from posenc.encodings import PositionalEncoding
from posenc.errors import UserError
from posenc.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, decay and clipping.

    Attributes:
        learning_rate: the peak.
        warmup_steps: of linear warm-up from 0.
        final_share: the learning rate at the end, as a share of the peak.
        weight_decay: of projection kernels only.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: of Adam.
        clip_norm: of the global gradient.
        schedule: ``cosine`` from warm-up to the end; or ``wsd``, warm-up, stable and decay: the
            peak is held, and falls linearly over the last ``decay_share`` of the steps.
        decay_share: of ``wsd``.
        z_loss: weight of the mean of ``log(Z)^2``, Z a token's sum of exponentiated logits, in
            what is minimised; the loss that is reported is without it.
        encoding_rate: the learning rate of encodings' parameters, as a multiple of that of others.
        encoding_decay: weight decay of all encodings' parameters; None leaves it to the encoding.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 100
    final_share: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_share: float = 0.2
    z_loss: float = 0.0
    encoding_rate: float = 1.0
    encoding_decay: float | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip_norm", "eps"):
            if not getattr(self, name) > 0:
                raise UserError(f"{_option(name)} is {getattr(self, name)}: it must be above 0")
        for name in (
            *("warmup_steps", "weight_decay", "final_share", "z_loss", "encoding_rate"),
            "encoding_decay",
        ):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise UserError(f"{_option(name)} is {value}: it must be at least 0")
        if self.schedule not in ("cosine", "wsd"):
            raise UserError(f"--schedule is {self.schedule!r}: it is cosine or wsd")
        if not 0 < self.decay_share <= 1:
            raise UserError(f"--decay-share is {self.decay_share}: it is above 0 and at most 1")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def decayed(model: Transformer, parameters: dict[str, Any]) -> dict[str, bool]:
    """Say of each parameter whether weight decay applies to it.

    Projection kernels are decayed, an untied head among them; embeddings, norms and biases are
    not, nor is an encoding's parameter unless the encoding names it.
    """
    own = {
        ".".join(map(str, ("encoding", *path, name)))
        for path, part in nnx.iter_graph(model.encoding)
        if isinstance(part, PositionalEncoding)
        for name in part.decayed
    }
    return {
        name: name in own
        or name == "head"
        or (name.endswith(".kernel") and not name.startswith("encoding."))
        for name in parameters
    }


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Give the learning rate by step: linear warm-up, then decay to the end.

    The first step takes a share ``1 / warmup_steps`` of the peak; the last one ``final_share``,
    unless the run ends within the warm-up.
    """
    warmup = min(config.warmup_steps, steps)
    end = config.learning_rate * config.final_share
    if config.schedule == "cosine":
        from_zero = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=config.learning_rate,
            warmup_steps=warmup,
            decay_steps=max(steps, warmup + 1),
            end_value=end,
        )
    else:
        decay = max(1, min(round(config.decay_share * steps), steps - warmup))
        from_zero = optax.join_schedules(
            [
                optax.linear_schedule(0.0, config.learning_rate, warmup),
                optax.constant_schedule(config.learning_rate),
                optax.linear_schedule(config.learning_rate, end, decay),
            ],
            [warmup, max(steps - decay, warmup)],
        )
    # At 0 the rate is 0, and a step would move nothing.
    return lambda step: from_zero(step + 1)


def optimizer(
    config: OptimizerConfig, steps: int, mask: dict[str, bool]
) -> optax.GradientTransformation:
    """Make the optimiser of a run of ``steps`` steps.

    Args:
        config: of it.
        steps: that the schedule spans.
        mask: what ``decayed`` says of every parameter.
    """
    own = {name: name.startswith("encoding.") for name in mask}
    apart = config.encoding_decay is not None
    shared = {name: on and not (apart and own[name]) for name, on in mask.items()}
    adam = [
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, shared),
    ]
    if config.encoding_decay is not None:
        adam.append(optax.add_decayed_weights(config.encoding_decay, own))
    if config.encoding_rate != 1:
        adam.append(optax.masked(optax.scale(config.encoding_rate), own))
    adam.append(optax.scale_by_learning_rate(schedule(config, steps)))
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.chain(*adam))
