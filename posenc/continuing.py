"""Runs that begin with the weights of another: a longer context, another encoding, or none."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from posenc.checkpoints import abstract
from posenc.errors import UserError
from posenc.optimizer import decayed, optimizer
from posenc.runs import Parent, Run, RunConfig, open_folder, without_parameters
from posenc.training import State, split


@dataclasses.dataclass(frozen=True)
class Carried:
    """What became of the parameters of a parent.

    Attributes:
        over: names of those that the child begins with.
        new: names of those that the child made itself, each with why.
        left: names of those that the child has no place for.
    """

    over: tuple[str, ...]
    new: dict[str, str]
    left: tuple[str, ...]

    def __str__(self) -> str:
        def listed(names: Any) -> str:
            names = list(names)
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
            return shown or "none"

        new = [name if why == "" else f"{name} ({why})" for name, why in self.new.items()]
        return (
            f"{len(self.over)} parameters carried over; new: {listed(new)}; left out: "
            f"{listed(self.left)}"
        )


def parent_of(folder: Path, step: int | None, keep_optimizer: bool) -> tuple[Run, Parent]:
    """Open the run that another one is to begin with, finished or not.

    Args:
        folder: of the parent.
        step: of its checkpoint; its last one if None.
        keep_optimizer: whether its optimiser's moments are carried over too.

    Raises:
        UserError: it is no run, or has no such checkpoint.
    """
    run = open_folder(folder)
    steps = run.checkpoints.steps()
    if not steps or (step is not None and step not in steps):
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"{folder} has no checkpoint of step {step}; it has: {there}")
    step = steps[-1] if step is None else step
    files = json.loads((run.checkpoints.folder / f"{step}.json").read_text())["files"]
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    config = run.config
    before = 0 if config.parent is None else config.parent.tokens
    return run, Parent(
        run=str(folder),
        step=step,
        config_hash=run.hash,
        weights=digest[:16],
        encoding=config.encoding,
        train_length=config.train_length,
        tokens=before + step * config.batch_size * config.train_length,
        optimizer="keep" if keep_optimizer else "reset",
    )


def _state_of(run: Run, step: int, keep_optimizer: bool) -> tuple[State, dict[str, type]]:
    """Read a parent's parameters (and optimiser), and the class of each part of its encoding."""
    config = run.config
    model = without_parameters(lambda: config.model_of(config.members[0]))
    shapes = split(model)[1]
    moments = jax.eval_shape(
        optimizer(config.optimizer, config.steps, decayed(model, shapes)).init, shapes
    )
    like = {"parameters": shapes, **({"optimizer": moments} if keep_optimizer else {})}
    if config.seeds > 1:
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((config.seeds, *leaf.shape), leaf.dtype), like
        )
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    read = run.checkpoints.restore(step, abstract(like, device))
    return read, _kinds(model)


def _kinds(model: Any) -> dict[str, type]:
    return {f"encoding.parts.{i}.": type(part) for i, part in enumerate(model.encoding.parts)}


def carry_over(run: Run, config: RunConfig, state: State) -> tuple[State, Carried]:
    """Give a child's first state, with what it can take of its parent.

    A parameter is carried over where both have one of that name and shape, and, where it is an
    encoding's, the encoding in that place is the same class. With the optimiser kept, so are its
    moments and what corrects their bias; the schedule begins anew.

    Args:
        run: the parent.
        config: of the child.
        state: the child's own first state.
    """
    assert config.parent is not None
    keep = config.parent.optimizer == "keep"
    read, kinds = _state_of(run, config.parent.step, keep)
    own_kinds = _kinds(without_parameters(lambda: config.model_of(config.members[0])))
    new: dict[str, str] = {}
    over = []
    for name, value in state["parameters"].items():
        place = next((p for p in own_kinds if name.startswith(p)), None)
        old = read["parameters"].get(name)
        if old is None or (place is not None and kinds.get(place) is not own_kinds[place]):
            new[name] = ""
        elif old.shape != value.shape:
            new[name] = f"{list(old.shape)} there, {list(value.shape)} here"
        else:
            over.append(name)
    left = tuple(name for name in read["parameters"] if name not in over and name not in new)
    carried = Carried(tuple(over), new, left)
    given = set(over)

    def placed(value: Any, old: Any) -> Any:
        return jax.device_put(np.asarray(old), value.sharding)

    parameters = {
        name: placed(value, read["parameters"][name]) if name in given else value
        for name, value in state["parameters"].items()
    }
    after = {**state, "parameters": parameters}
    if keep:
        paths = jax.tree_util.tree_leaves_with_path(read["optimizer"])
        before = {jax.tree_util.keystr(path): leaf for path, leaf in paths}

        def moment(path: Any, value: Any) -> Any:
            text = jax.tree_util.keystr(path)
            named = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
            # Adam's own count stands beside its moments; the schedule's is left at 0.
            count = text.endswith(".count") and any(
                key.startswith(text.removesuffix(".count") + ".mu") for key in before
            )
            chosen = named[-1] in given if named else count
            return placed(value, before[text]) if chosen and text in before else value

        after["optimizer"] = jax.tree_util.tree_map_with_path(moment, state["optimizer"])
    return after, carried


def check_child(run: Run, config: RunConfig, data: dict[str, Any]) -> None:
    """Raise ``UserError`` where a child cannot begin with a parent's weights at all."""
    old = run.config
    assert config.parent is not None
    frozen = run.frozen(config.parent.step)
    if frozen:
        raise UserError(
            f"--init-from {run.folder}: the loss of seed {min(frozen)} was not finite after "
            f"{frozen[min(frozen)]} steps: train it with a lower --learning-rate first, or give an "
            "earlier --init-step"
        )
    for what in ("tokenizer", "tokenizer_sha256"):
        if run.data.get(what) != data.get(what):
            raise UserError(
                f"--init-from {run.folder} was trained with {what} {run.data.get(what)}, and this "
                f"run has {data.get(what)}: its tokens mean something else; give the same one"
            )
    if old.seeds != config.seeds:
        raise UserError(
            f"--init-from {run.folder} trained {old.seeds} seed(s) at once, and this run has "
            f"{config.seeds}: give as many with --seeds"
        )
    if config.model.sharing != "all" or old.model.sharing != "all":
        raise UserError(
            "--init-from is of blocks whose weights all positions share: --sharing all, there and "
            "here"
        )
