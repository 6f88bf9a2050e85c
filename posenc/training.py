"""Loss and train step, on split state, of one seed or of several at once.

Let B denote the batch, T the tokens of a window, M the model width, V the vocabulary and N the
seeds. Parameters are a flat dictionary, name -> array, such as
``blocks.0.attention.query.kernel``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from posenc.devices import batch_sharding, mesh_of, sharding_of
from posenc.optimizer import OptimizerConfig, decayed, optimizer, schedule
from posenc.transformer import Tensor, Transformer
from posenc.watching import learned

Parameters = dict[str, Any]
Batch = dict[str, Any]
State = dict[str, Any]

# Logits of at most so many tokens times vocabulary exist at a time (256 MiB in float32).
LOGITS_AT_A_TIME = 2**26

DROPOUT_STREAM = 0x64726F70


def pieces(model: nnx.Module) -> tuple[Callable[[Parameters, Parameters], Any], Any, Any]:
    """Split a model into parameters, constants, and the function that puts it together from both.

    Constants are what is drawn when a model is made, and never trained.
    """
    graph, *states = nnx.split(model, nnx.Param, ...)
    flat = [dict(nnx.to_flat_state(state)) for state in states]
    names = [{path: ".".join(map(str, path)) for path in variables} for variables in flat]

    def merge(parameters: Parameters, constants: Parameters) -> Any:
        made = [
            nnx.from_flat_state({p: kept[p].replace(values[name]) for p, name in own.items()})
            for kept, own, values in zip(flat, names, (parameters, constants), strict=True)
        ]
        return nnx.merge(graph, *made)

    parameters, constants = (
        {name: kept[path].get_value() for path, name in own.items()}
        for kept, own in zip(flat, names, strict=True)
    )
    return merge, parameters, constants


def split(model: nnx.Module) -> tuple[Callable[[Parameters], Any], Parameters]:
    """Split a model into its parameters and the function that puts it together from them."""
    merge, parameters, constants = pieces(model)
    return lambda parameters: merge(parameters, constants), parameters


def token_losses(
    model: Transformer, hidden: Float[Array, "B T M"], targets: Int[Tensor, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Give each target's negative log-likelihood, nats, and ``log Z`` of its logits, float32.

    The logits are made a stretch of tokens at a time and again in the backward pass, so that
    memory does not grow with T times V.
    """

    def some(hidden: Array, targets: Array) -> tuple[Array, Array]:
        logits = model.logits(hidden)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        log_z = jax.nn.logsumexp(logits, axis=-1)
        return log_z - chosen, log_z

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
    nll, log_z = jax.lax.map(body, stretches)
    nll, log_z = (jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length] for x in (nll, log_z))
    return nll, log_z


def token_nll(
    model: Transformer, hidden: Float[Array, "B T M"], targets: Int[Tensor, "B T"]
) -> Float[Array, "B T"]:
    """Give the negative log-likelihood of each target, nats, float32."""
    return token_losses(model, hidden, targets)[0]


def summed_losses(
    model: Transformer, batch: Batch, key: Array | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Give the sums of the loss and of ``log(Z)^2`` over the targets that ``mask`` admits."""
    places = batch["positions"], batch["segments"], batch.get("streams")
    hidden, _ = model.hidden(batch["inputs"], *places, key=key)
    nll, log_z = token_losses(model, hidden, batch["targets"])
    # Chosen, not multiplied by 0: what is masked may be anything.
    loss, squares = (jnp.sum(jnp.where(batch["mask"], x, 0.0)) for x in (nll, log_z**2))
    return loss, squares


def mean_nll(model: Transformer, batch: Batch, key: Array | None = None) -> Float[Array, ""]:
    """Give the mean over the targets that ``mask`` admits, nats a token."""
    return summed_losses(model, batch, key)[0] / admitted(batch)


def admitted(batch: Batch) -> Array:
    """Count the targets that ``mask`` admits; 1 where there is none."""
    return jnp.maximum(jnp.sum(batch["mask"]), 1)


class Trainer:
    """A model, its optimiser and the compiled functions that train and validate it.

    Given several models, one a seed, it trains them at once, one compiled step for all: arrays
    begin with an axis of N then, batches too. A seed whose loss or gradient is not finite is frozen
    as it was before that step, and ``step`` is ``-1 - s`` from then on, s the steps that it took;
    the others go on.

    Args:
        models: to be trained: one, or one a seed.
        config: of the optimiser.
        steps: of the whole run, which the schedule spans.
        seeds: of dropout, as many.
        fsdp: devices that share a copy of parameters and optimiser state.
        accumulate: parts of a batch, of which one after another is computed.
    """

    def __init__(
        self,
        models: Transformer | Sequence[Transformer],
        config: OptimizerConfig,
        steps: int,
        seeds: int | Sequence[int],
        *,
        fsdp: int = 1,
        accumulate: int = 1,
    ):
        self.several = several = not isinstance(models, Transformer)
        every = [models] if isinstance(models, Transformer) else list(models)
        first = every[0]
        taken = [pieces(model) for model in every]
        merge, own, _ = taken[0]
        parameters, constants = (
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) if several else trees[0]
            for trees in zip(*(trees for _, *trees in taken), strict=True)
        )
        transform = optimizer(config, steps, decayed(first, own))
        rate = schedule(config, steps)
        # A stream of its own: without a tag the first steps' keys are those of the initialisation.
        tagged = [
            jax.random.fold_in(jax.random.key(seed), DROPOUT_STREAM)
            for seed in ([seeds] if isinstance(seeds, int) else seeds)
        ]
        drawn = jnp.stack(tagged) if several else tagged[0]
        dropout = drawn if first.config.dropout else None

        def gradient_of(parameters, constants, batch, key):
            """Give the gradient of what is minimised, and the loss, over all parts of a batch."""
            count = admitted(batch)

            def minimised(parameters, part, key):
                nll, squares = summed_losses(merge(parameters, constants), part, key)
                return (nll + config.z_loss * squares) / count, nll / count

            compute = jax.grad(minimised, has_aux=True)
            if accumulate == 1:
                return compute(parameters, batch, key)

            # Every device's rows are spread over all parts: no row moves to another one.
            parts = jax.tree.map(
                lambda leaf: jnp.swapaxes(leaf.reshape(-1, accumulate, *leaf.shape[1:]), 0, 1),
                batch,
            )

            def add(carry, numbered):
                number, part = numbered
                own = None if key is None else jax.random.fold_in(key, number)
                return jax.tree.map(jnp.add, carry, compute(parameters, part, own)), None

            zeros = jax.tree.map(jnp.zeros_like, parameters), jnp.zeros(())
            return jax.lax.scan(add, zeros, (jnp.arange(accumulate), parts))[0]

        def step(state: State, batch: Batch, key: Any, constants: Any) -> tuple[State, State]:
            at = state["step"]
            now = jnp.where(at < 0, ~at, at)
            key = None if key is None else jax.random.fold_in(key, now)
            gradient, loss = gradient_of(state["parameters"], constants, batch, key)
            updates, moments = transform.update(gradient, state["optimizer"], state["parameters"])
            norm = optax.tree.norm(gradient)
            after = {
                "parameters": optax.apply_updates(state["parameters"], updates),
                "optimizer": moments,
                "step": at + 1,
            }
            if several:
                good = (at >= 0) & jnp.isfinite(loss) & jnp.isfinite(norm)
                after = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, state)
                after["step"] = jnp.where(good, at + 1, ~now)
            return after, {"loss": loss, "gradient_norm": norm, "learning_rate": rate(now)}

        def nll(parameters: Parameters, batch: Batch, constants: Any) -> Array:
            return mean_nll(merge(parameters, constants), batch)

        if several:
            step = jax.vmap(step, in_axes=(0, 0, None if dropout is None else 0, 0))
            nll = jax.vmap(nll)
        self.mesh = mesh_of(fsdp, len(every) if several else 1)
        self.by_row = batch_sharding(self.mesh, several)
        initial = jax.vmap(transform.init) if several else transform.init
        moments = jax.eval_shape(initial, parameters)
        self._start = {
            "parameters": parameters,
            "step": jnp.zeros((len(every),) if several else (), jnp.int32),
        }
        # Pinned on input and output: left to the compiler, the sharding of moments drifts after a
        # step, unseen.
        self.shardings = jax.tree.map(
            lambda leaf: sharding_of(leaf.shape, self.mesh, several),
            {**self._start, "optimizer": moments},
        )
        self._initial = jax.jit(initial, out_shardings=self.shardings["optimizer"])
        everywhere = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        self._fixed = jax.device_put((dropout, constants), everywhere)
        self._merge = merge
        self._step = jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(self.shardings, self.by_row, everywhere, everywhere),
            out_shardings=(self.shardings, everywhere),
        )
        self._nll = jax.jit(
            nll, in_shardings=(self.shardings["parameters"], everywhere, everywhere)
        )

        self._learned = jax.jit(
            lambda parameters: learned(parameters, several),
            in_shardings=(self.shardings["parameters"],),
            out_shardings=everywhere,
        )

    def start(self) -> State:
        """Give the state before the first step: parameters, optimiser, step."""
        known = {name: self.shardings[name] for name in self._start}
        # By way of the host, for steps use up what they are given.
        state = jax.device_put(jax.tree.map(np.array, self._start), known)
        return {**state, "optimizer": self._initial(state["parameters"])}

    def merge(self, parameters: Parameters) -> Transformer:
        """Put the one model together from its parameters."""
        assert not self.several
        return self._merge(parameters, self._fixed[1])

    def step(self, state: State, batch: Batch) -> tuple[State, State]:
        """Take one step on this process's rows of a batch; ``state`` is used up."""
        rows = jax.tree.map(
            lambda value: jax.make_array_from_process_local_data(self.by_row, np.asarray(value)),
            batch,
        )
        return self._step(state, rows, *self._fixed)

    def nll(self, state: State, batch: Batch) -> np.ndarray:
        """Give the mean negative log-likelihood of a batch, nats a token; one a seed of several."""
        return np.asarray(self._nll(state["parameters"], batch, self._fixed[1]))

    def learned(self, state: State) -> dict[str, np.ndarray]:
        """Give mean and root mean square of every parameter of the encoding; one a seed."""
        return jax.tree.map(np.asarray, self._learned(state["parameters"]))
