"""What came of a sweep's trials: the settings of every encoding, and the runs that have them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from posenc.checkpoints import write_json
from posenc.errors import UserError
from posenc.runs import recipe_hash
from studies.cells import finished
from studies.sweep import Cell, Sweep, Tuning, make_cell

CRITERION = "validation loss at the training length, last step"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a group of cells is trained with.

    Attributes:
        chosen: options by name: those of the lowest loss, of the first where several have it.
        losses: of every trial, nats a token, in order; infinite where it diverged.
    """

    chosen: dict[str, Any]
    losses: list[float]


def _loss(trial: Cell) -> float:
    """Give the validation loss of a trial that is done."""
    if (trial.folder / "diverged.json").exists():
        return math.inf
    name = f"valid_nll_{trial.config.train_length}"
    rows = map(json.loads, (trial.folder / "metrics.jsonl").read_text().splitlines())
    (loss,) = (row[name] for row in rows if row["step"] == trial.config.steps and name in row)
    if loss is None:
        raise UserError(
            f"{trial.folder} has no validation loss at the training length, by which to choose: "
            "its positions cannot be validated"
        )
    return loss


def choices(sweep: Sweep) -> dict[tuple[str, int, str], Choice] | None:
    """Give every group's choice, once all trials are done; None before.

    Raises:
        UserError: all trials of a group diverged, or have no validation loss.
    """
    if sweep.tuning is None:
        return {}
    if not all(finished(trial) for trial in sweep.trials):
        return None
    found = {}
    for group in dict.fromkeys(trial.group for trial in sweep.trials):
        losses = [_loss(trial) for trial in sweep.trials if trial.group == group]
        best = min(losses)
        if math.isinf(best):
            raise UserError(
                f"{sweep.path}: all {len(losses)} trials of {', '.join(map(str, group))} diverged: "
                "give other values in [tune]"
            )
        found[group] = Choice(sweep.tuning.combinations[losses.index(best)], losses)
    return found


def tuned(sweep: Sweep) -> dict[Cell, Cell]:
    """Give the run that each cell becomes when it is tuned, which may be itself; empty before."""
    chosen = choices(sweep) or {}
    found = {}
    for cell in sweep.cells if chosen else ():
        options = {**cell.options, **chosen[cell.group].chosen}
        own = make_cell(sweep.out, options, cell.group, f"{cell.ending}-tuned")
        found[cell] = cell if own.config == cell.config else own
    return found


def runs_of(sweep: Sweep) -> list[Cell]:
    """Give every run that is scored, as far as they are known: tuned ones once trials are done."""
    return list(dict.fromkeys([*sweep.cells, *tuned(sweep).values()]))


def known(sweep: Sweep) -> list[Cell]:
    """Give all that is to be trained, as far as it is known."""
    return list(dict.fromkeys([*sweep.cells, *sweep.trials, *runs_of(sweep)]))


def all_finished(sweep: Sweep) -> bool:
    """Say whether all is trained, what trials lead to as well."""
    # Looked at once all that is known is there: then trials are done, and tuned runs known.
    return all(map(finished, [*sweep.cells, *sweep.trials])) and all(map(finished, known(sweep)))


def write_tuning(sweep: Sweep) -> Path | None:
    """Write for ``python -m eval score`` what each run is; None where nothing is tuned."""
    if sweep.tuning is None:
        return None
    chosen, path = choices(sweep), sweep.out / "tuning.json"
    assert chosen is not None
    runs: dict[str, list[dict[str, Any]]] = {}
    for cell in sweep.cells:
        runs.setdefault(cell.name, []).append({"settings": "shared"})
    for cell, own in tuned(sweep).items():
        choice = chosen[cell.group]
        runs.setdefault(own.name, []).append(
            {
                "settings": "tuned",
                # What it shares with the others: all but what was tuned.
                "recipe_hash": recipe_hash(cell.config),
                "tuning": {
                    **_design(sweep.tuning, sweep.trials[0]),
                    "chosen": choice.chosen,
                    "losses": [loss if math.isfinite(loss) else None for loss in choice.losses],
                },
            }
        )
    write_json(path, {"runs": runs})
    return path


def _design(tuning: Tuning, trial: Cell) -> dict[str, Any]:
    return {
        "trials": len(tuning.combinations),
        "grid": tuning.grid,
        "seed": trial.config.seed,
        "steps": trial.config.steps,
        "criterion": CRITERION,
    }
