"""Loss, optimiser and train step, on split state.

Let B denote the batch, T the tokens of a window, M the model width and V the vocabulary.
Parameters are a flat dictionary, name -> array, such as ``blocks.0.attention.query.kernel``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from posenc.encodings import PositionalEncoding
from posenc.errors import UserError
from posenc.transformer import Tensor, Transformer

Parameters = dict[str, Any]
Batch = dict[str, Any]

# Logits of at most so many tokens times vocabulary exist at a time (256 MiB in float32).
LOGITS_AT_A_TIME = 2**26

DROPOUT_STREAM = 0x64726F70


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, cosine decay and clipping.

    Attributes:
        learning_rate: the peak.
        warmup_steps: of linear warm-up from 0.
        final_share: the learning rate at the end, as a share of the peak.
        weight_decay: of projection kernels only.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: of Adam.
        clip_norm: of the global gradient.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 100
    final_share: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("learning_rate", 0), ("clip_norm", 0), ("eps", 0)):
            if not getattr(self, name) > least:
                option = "--" + name.replace("_", "-")
                raise UserError(f"{option} is {getattr(self, name)}: it must be above {least}")
        for name in ("warmup_steps", "weight_decay", "final_share"):
            if not getattr(self, name) >= 0:
                option = "--" + name.replace("_", "-")
                raise UserError(f"{option} is {getattr(self, name)}: it must be at least 0")


def split(model: nnx.Module) -> tuple[Callable[[Parameters], Any], Parameters]:
    """Split a model into its parameters and the function that puts it together from them."""
    graph, *states = nnx.split(model, nnx.Param, ...)
    trained, rest = states
    variables = dict(nnx.to_flat_state(trained))
    names = {path: ".".join(map(str, path)) for path in variables}

    def merge(parameters: Parameters) -> Any:
        flat = {path: variables[path].replace(parameters[name]) for path, name in names.items()}
        return nnx.merge(graph, nnx.from_flat_state(flat), rest)

    return merge, {name: variables[path].get_value() for path, name in names.items()}


def decayed(model: Transformer, parameters: Parameters) -> dict[str, bool]:
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
    """Give the learning rate by step: linear warm-up, then cosine decay to the end.

    The first step takes a share ``1 / warmup_steps`` of the peak; the last one ``final_share``,
    unless the run ends within the warm-up.
    """
    warmup = min(config.warmup_steps, steps)
    from_zero = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=config.learning_rate * config.final_share,
    )
    # At 0 the rate is 0, and a step would move nothing.
    return lambda step: from_zero(step + 1)


def optimizer(
    config: OptimizerConfig, steps: int, mask: dict[str, bool]
) -> optax.GradientTransformation:
    """Make the optimiser of a run of ``steps`` steps."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule(config, steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=mask,
        ),
    )


def token_nll(
    model: Transformer, hidden: Float[Array, "B T M"], targets: Int[Tensor, "B T"]
) -> Float[Array, "B T"]:
    """Give the negative log-likelihood of each target, nats, float32.

    The logits are made a stretch of tokens at a time and again in the backward pass, so that
    memory does not grow with T times V.
    """

    def some(hidden: Array, targets: Array) -> Array:
        logits = model.logits(hidden)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen

    targets = jnp.asarray(targets)
    batch, length, width = hidden.shape
    stretch = max(1, LOGITS_AT_A_TIME // (batch * model.config.vocab_size))
    if length <= stretch:
        return some(hidden, targets)
    count = -(-length // stretch)
    padded = count * stretch - length
    hidden = jnp.pad(hidden, ((0, 0), (0, padded), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padded)))
    stretches = (
        jnp.moveaxis(hidden.reshape(batch, count, stretch, width), 1, 0),
        jnp.moveaxis(targets.reshape(batch, count, stretch), 1, 0),
    )
    body = jax.checkpoint(lambda pair: some(*pair), prevent_cse=False)
    nll = jax.lax.map(body, stretches)
    return jnp.moveaxis(nll, 0, 1).reshape(batch, -1)[:, :length]


def mean_nll(model: Transformer, batch: Batch, key: Array | None = None) -> Float[Array, ""]:
    """Give the mean over the targets that ``mask`` admits, nats a token."""
    places = batch["positions"], batch["segments"], batch.get("streams")
    hidden, _ = model.hidden(batch["inputs"], *places, key=key)
    nll = token_nll(model, hidden, batch["targets"])
    # Chosen, not multiplied by 0: what is masked may be anything.
    chosen = jnp.where(batch["mask"], nll, 0.0)
    return jnp.sum(chosen) / jnp.maximum(jnp.sum(batch["mask"]), 1)


def check_batch_size(batch_size: int) -> None:
    """Raise ``UserError`` if the devices cannot share a batch evenly."""
    devices = jax.device_count()
    if batch_size % devices:
        raise UserError(
            f"--batch-size {batch_size} cannot be shared by {devices} devices: "
            f"make it a multiple of {devices}"
        )


class Trainer:
    """A model, its optimiser and the compiled functions that train and validate it.

    Args:
        model: to be trained.
        config: of the optimiser.
        steps: of the whole run, which the schedule spans.
        seed: of dropout.
    """

    def __init__(self, model: Transformer, config: OptimizerConfig, steps: int, seed: int):
        merge, parameters = split(model)
        transform = optimizer(config, steps, decayed(model, parameters))
        rate = schedule(config, steps)
        # A stream of its own: without a tag the first steps' keys are those of the initialisation.
        tagged = jax.random.fold_in(jax.random.key(seed), DROPOUT_STREAM)
        dropout_key = tagged if model.config.dropout else None
        # All devices share a batch's rows; every device holds all parameters. Pinned on input and
        # output: left to the compiler, the sharding of moments drifts after a step, unseen.
        self.mesh = jax.make_mesh(
            (jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
        )
        self.replicated = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        self.by_row = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec("data"))

        def step(state: dict[str, Any], batch: Batch) -> tuple[dict[str, Any], dict[str, Array]]:
            at = state["step"]
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, at)
            loss, gradient = jax.value_and_grad(lambda p: mean_nll(merge(p), batch, key))(
                state["parameters"]
            )
            updates, moments = transform.update(gradient, state["optimizer"], state["parameters"])
            after = {
                "parameters": optax.apply_updates(state["parameters"], updates),
                "optimizer": moments,
                "step": at + 1,
            }
            norm = optax.tree.norm(gradient)
            return after, {"loss": loss, "gradient_norm": norm, "learning_rate": rate(at)}

        self.merge = merge
        self._step = jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(self.replicated, self.by_row),
            out_shardings=(self.replicated, self.replicated),
        )
        self._nll = jax.jit(
            lambda parameters, batch: mean_nll(merge(parameters), batch),
            in_shardings=(self.replicated, self.replicated),
        )
        self._start = {
            "parameters": parameters,
            "optimizer": transform.init(parameters),
            "step": jnp.zeros((), jnp.int32),
        }

    def start(self) -> dict[str, Any]:
        """Give the state before the first step: parameters, optimiser, step."""
        return jax.device_put(self._start, self.replicated)

    def step(self, state: dict[str, Any], batch: Batch) -> tuple[dict[str, Any], dict[str, Array]]:
        """Take one step on this process's rows of a batch; ``state`` is used up."""
        rows = jax.tree.map(
            lambda value: jax.make_array_from_process_local_data(self.by_row, np.asarray(value)),
            batch,
        )
        return self._step(state, rows)

    def nll(self, state: dict[str, Any], batch: Batch) -> float:
        """Give the mean negative log-likelihood of a batch, nats a token."""
        return float(self._nll(state["parameters"], batch))
