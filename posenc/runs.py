"""A run's folder: its config, where it came from, its metrics, its checkpoints."""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from posenc import data as datasets
from posenc.boards import WeightsAndBiases, tensorboard
from posenc.checkpoints import Checkpoints, abstract, write_json
from posenc.encodings.registry import canonical_part, canonical_spec, make_sampler, parse_part
from posenc.errors import UserError, make_folder
from posenc.metrics import Metrics
from posenc.optimizer import OptimizerConfig
from posenc.processes import is_first, wait
from posenc.sharing import canonical_sharing
from posenc.training import split
from posenc.transformer import DType, Transformer, TransformerConfig, count_parameters

PACKAGES = ("posenc", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@dataclasses.dataclass(frozen=True)
class Parent:
    """The run whose weights another one begins with.

    Attributes:
        run: its folder, as it was given.
        step: of its checkpoint.
        config_hash: of the parent.
        weights: a hash of the checkpoint's files.
        encoding: the parent's.
        train_length: the parent's.
        tokens: that it was trained on until then, its own parents' among them.
        optimizer: whether its moments are carried over too, ``keep`` or ``reset``.
    """

    run: str
    step: int
    config_hash: str
    weights: str
    encoding: str
    train_length: int
    tokens: int
    optimizer: Literal["keep", "reset"]


@dataclasses.dataclass(frozen=True)
class Member:
    """Where one of the seeds that are trained at once draws from.

    Attributes:
        seed: of dropout, and its name.
        init: of the initial parameters.
        data: of the order of the data.
        encoding: of what the encoding draws.
    """

    seed: int
    init: int
    data: int
    encoding: int


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """All that decides what a run computes; saved as JSON in its folder and read back.

    Attributes:
        encoding: a spec, in its canonical form.
        preset: the name that ``model`` was made from.
        model: the transformer's shape.
        data: a corpus by name, a glob of text or JSONL files, or token files.
        separator_id: what begins a document in token files.
        tokenizer: by name, or the path of its file.
        bos: ``document``: every document begins with a BOS token; or ``none``.
        positions: what gives the tokens of a window their positions, in a canonical form.
        train_length: tokens of a training window, and the length that the model is built for.
        lengths: into what pieces training windows are cut, in a canonical form.
        packing: how documents share windows: ``masked`` from each other, ``unmasked``, or ``none``,
            a window being of one document and padded.
        batch_size: windows of a step, over all devices.
        steps: of the run.
        seed: of the initial parameters, the order of the data, the encoding's own draws and
            dropout.
        seeds: how many are trained at once, ``seed`` and those after it.
        init_seed: of the initial parameters of all of them, encodings' apart, instead.
        data_seed: of the order of the data and its positions.
        encoding_seed: of what the encoding draws, its initial parameters too.
        parent: the run whose weights it begins with, if there is one.
        accumulate: parts of a batch, of which one after another is computed.
        matmul_precision: of matrix products, JAX's name for it; None is the backend's own.
        optimizer: AdamW's settings.
        eval_every: steps between validations.
        eval_tokens: of the validation split, at each length.
        checkpoint_every: steps between checkpoints.
    """

    encoding: str
    preset: str
    model: TransformerConfig
    data: str
    separator_id: int | None = None
    tokenizer: str = "bytes"
    bos: Literal["document", "none"] = "document"
    positions: str = "sequential"
    train_length: int = 64
    lengths: str = "fixed"
    packing: Literal["masked", "unmasked", "none"] = "masked"
    batch_size: int = 32
    steps: int = 600
    seed: int = 0
    seeds: int = 1
    init_seed: int | None = None
    data_seed: int | None = None
    encoding_seed: int | None = None
    parent: Parent | None = None
    accumulate: int = 1
    matmul_precision: str | None = None
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    eval_every: int = 200
    eval_tokens: int = 16_384
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        for name in (
            "train_length",
            "batch_size",
            "steps",
            "eval_every",
            "eval_tokens",
            "checkpoint_every",
        ):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise UserError(f"{option} is {getattr(self, name)}: it must be at least 1")
        if self.seeds < 1:
            raise UserError(f"--seeds is {self.seeds}: it must be at least 1")
        last = self.seed + self.seeds - 1
        for seed in (self.seed, last, self.init_seed, self.data_seed, self.encoding_seed):
            if seed is not None and not 0 <= seed < 2**32:
                raise UserError(f"seed {seed} is outside 0 <= seed < 2**32: give one inside")
        object.__setattr__(self, "encoding", canonical_spec(self.encoding))
        make_sampler(self.positions)  # refused here if there is no such thing
        placing = str(canonical_part(parse_part(self.positions)))
        object.__setattr__(self, "positions", placing)
        datasets.make_regime(self.lengths, self.train_length)
        object.__setattr__(self, "lengths", str(canonical_part(parse_part(self.lengths))))
        sharing = canonical_sharing(self.model.sharing, self.train_length)
        object.__setattr__(self, "model", dataclasses.replace(self.model, sharing=sharing))

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> RunConfig:
        """Read what ``dataclasses.asdict`` gave."""
        tree = dict(tree)
        tree["model"] = TransformerConfig(**tree["model"])
        tree["optimizer"] = OptimizerConfig(**tree["optimizer"])
        if tree.get("parent") is not None:
            tree["parent"] = Parent(**tree["parent"])
        return cls(**tree)

    @property
    def members(self) -> tuple[Member, ...]:
        """Where each of the seeds that are trained at once draws from."""

        def given(own: int, fixed: int | None) -> int:
            return own if fixed is None else fixed

        return tuple(
            Member(
                own,
                given(own, self.init_seed),
                given(own, self.data_seed),
                given(own, self.encoding_seed),
            )
            for own in range(self.seed, self.seed + self.seeds)
        )

    def model_of(self, member: Member, *, allow_plugins: bool = True) -> Transformer:
        """Make the untrained model of one seed."""
        return Transformer(
            self.model,
            self.encoding,
            self.train_length,
            seed=member.init,
            encoding_seed=member.encoding,
            allow_plugins=allow_plugins,
        )

    @property
    def default_name(self) -> str:
        """The run's name, made from encoding, positions, training length, sharing and seed."""
        # What joins parts and layers is told apart: rope+alibi and rope,alibi are two runs.
        text = self.encoding
        for mark, word in (("+", "_plus_"), ("*", "_times_"), ("),", ")_then_"), (",", "_then_")):
            text = text.replace(mark, word)
        slug = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")
        way, placing, pieces = (
            re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")
            for text in (self.model.sharing, self.positions, self.lengths)
        )
        regime = "" if pieces == "fixed" else f"-{pieces}"
        regime += "" if self.packing == "masked" else f"-packing-{self.packing}"
        sharing = "" if way == "all" else f"-sharing-{way}"
        placed = "" if placing == "sequential" else f"-{placing}"
        seeds = str(self.seed)
        if self.seeds > 1:
            seeds += f"to{self.seed + self.seeds - 1}"
        for kind in ("init", "data", "encoding"):
            fixed = getattr(self, f"{kind}_seed")
            seeds += "" if fixed is None else f"-{kind}{fixed}"
        came = "" if self.parent is None else f"-from-{Path(self.parent.run).name}"
        return f"{slug}{placed}-T{self.train_length}{regime}{sharing}-seed{seeds}{came}"


# What could not be chosen at first, and what it was then.
_SINCE: dict[str, dict[str, Any]] = {
    "": {
        **{"lengths": "fixed", "packing": "masked"},
        **{"positions": "sequential", "seeds": 1, "accumulate": 1, "matmul_precision": None},
        "parent": None,
        **{"init_seed": None, "data_seed": None, "encoding_seed": None, "separator_id": None},
    },
    "model": {"sharing": "all", "remat": "none", "scan": False},
    "optimizer": {
        **{"schedule": "cosine", "decay_share": 0.2, "z_loss": 0.0},
        **{"encoding_rate": 1.0, "encoding_decay": None},
    },
}


def config_hash(config: RunConfig, data: dict[str, Any]) -> str:
    """Give the SHA-256 of a config and the identity of its data, 16 hexadecimal digits."""
    tree = dataclasses.asdict(config)
    # The hash that the same config had before these could be chosen.
    for part, defaults in _SINCE.items():
        own = tree[part] if part else tree
        for name, default in defaults.items():
            if own[name] == default:
                del own[name]
    text = json.dumps([tree, data], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recipe_hash(config: RunConfig) -> str:
    """Give a hash of all that runs share which differ in encoding, seed and data at the most."""
    seeds: dict[str, Any] = {f"{kind}_seed": None for kind in ("init", "data", "encoding")}
    recipe = dataclasses.replace(config, encoding="none", data="", seed=0, seeds=1, **seeds)
    if config.parent is not None:  # each encoding's runs go on from a run of its own
        any_run: dict[str, Any] = {"run": "", "config_hash": "", "weights": "", "encoding": ""}
        parent = dataclasses.replace(config.parent, **any_run)
        recipe = dataclasses.replace(recipe, parent=parent)
    recipe = dataclasses.replace(recipe, eval_every=1, eval_tokens=1, checkpoint_every=1)
    return config_hash(recipe, {})


def source_hash(files: Iterable[str | Path] = ()) -> str:
    """Give a hash of posenc's own sources, and of other files that a number depends on."""
    root = Path(__file__).resolve().parent
    own = [*root.rglob("*.py"), *(root.parent / "eval").glob("*.py")]
    digest = hashlib.sha256()
    for path in [*sorted(own), *sorted(map(Path, files))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _git(*words: str) -> str | None:
    # Of posenc's own checkout, wherever the command was given; an installed copy has none.
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def provenance() -> dict[str, Any]:
    """Say which code, packages and device are at work now.

    ``commit`` and ``dirty`` are null where posenc is no checkout; ``matmul_precision`` is JAX's
    default for matrix products, null being the backend's own.
    """
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    status = _git("status", "--porcelain")
    devices = jax.devices()
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "versions": {"python": platform.python_version(), **versions},
        "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
    }


class Run:
    """A run's folder.

    Attributes:
        folder: ``OUT/NAME``.
        config: of the run.
        data: identity of what it is trained on.
        checkpoints: in the folder ``checkpoints``.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        data: dict[str, Any],
        keep: int = 2,
        always: Iterable[int] = (),
    ):
        self.folder = folder
        self.config = config
        self.data = data
        self.checkpoints = Checkpoints(folder / "checkpoints", keep, always)
        self._lock: Any = None

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.name

    @property
    def finished(self) -> bool:
        """Whether the checkpoint of the last step is there."""
        return self.config.steps in self.checkpoints.steps()

    def frozen(self, step: int) -> dict[int, int]:
        """Give the seeds that could not be trained to a checkpoint, each with the steps it took."""
        if self.config.seeds == 1:
            return {}
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.ShapeDtypeStruct((self.config.seeds,), np.int32, sharding=device)
        taken = np.asarray(self.checkpoints.restore(step, {"step": like})["step"])
        every = zip(self.config.members, taken.tolist(), strict=True)
        return {member.seed: ~count for member, count in every if count < 0}

    def seconds(self, step: int) -> float | None:
        """Give the seconds that training took to a step, validation and compilation among them.

        What a process did after the checkpoint that the next one went on from does not count. None
        of runs that are older than the record.
        """
        rows = self._metrics()
        taken = [row["seconds"] for row in rows if "seconds" in row and row["step"] <= step]
        return taken[-1] if taken else None

    def last_validations(
        self, step: int, seed: int | None = None, count: int = 5
    ) -> dict[str, list[float | None]]:
        """Give the losses of the last validations up to a step, the last one last, by length.

        Args:
            step: of the checkpoint.
            seed: which, of a run that trained several at once.
            count: how many validations, at most.
        """
        several = self.config.seeds > 1
        found: dict[str, list[float | None]] = {}
        for row in self._metrics():
            if row["step"] > step or (several and row.get("seed") != seed):
                continue
            for name, loss in row.items():
                if name.startswith("valid_nll_"):
                    found.setdefault(name.removeprefix("valid_nll_"), []).append(loss)
        return {length: losses[-count:] for length, losses in found.items()}

    def _metrics(self) -> list[dict[str, Any]]:
        """Give the lines of ``metrics.jsonl``; none where it cannot be read."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return []

    @property
    def hash(self) -> str:
        """The config's hash."""
        return config_hash(self.config, self.data)

    def lock(self) -> None:
        """Keep other processes from training here, until ``unlock`` or the end of this one.

        Raises:
            UserError: another one already does.
        """
        self._lock = open(self.folder / ".lock", "w")  # noqa: SIM115  (held open on purpose)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.folder} is being trained by another process: wait for it, or choose "
                "another --name"
            ) from None

    def unlock(self) -> None:
        """Let others train here again."""
        if self._lock is not None:
            self._lock.close()

    def record_start(
        self,
        models: Sequence[Transformer],
        resumed_from: int | None,
        flops: float | None = None,
    ) -> None:
        """Append to ``provenance.json`` that training starts, or goes on, here and now.

        Args:
            models: of every seed.
            resumed_from: the step, if it goes on.
            flops: that training takes for a token, as ``flops_a_token`` counts them.

        Raises:
            UserError: the models' constants are not those that the run began with.
        """
        path = self.folder / "provenance.json"
        if resumed_from is not None:
            for index, model in enumerate(models):
                self.check_constants(model, index)
        if not is_first():
            return
        starts = json.loads(path.read_text())["starts"] if path.exists() else []
        starts.append(
            {
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
                "resumed_from": resumed_from,
                **provenance(),
            }
        )
        write_json(
            path,
            {
                "parameters": count_parameters(models[0]),
                "flops_a_token": flops,
                "constants": [constants_hash(model) for model in models],
                "starts": starts,
            },
        )

    def record_distances(self, batches: Sequence[datasets.Batches]) -> None:
        """Write ``distances.json``: how far queries can look in training, over 32 even steps."""
        steps = np.unique(np.linspace(0, self.config.steps - 1, 32).round().astype(int))
        some = (batches[0][int(step)] for step in steps)
        found = datasets.attended_distances(some, self.config.train_length)
        write_json(self.folder / "distances.json", found)

    def metrics(self, after: int, wandb: str | None = None) -> Metrics:
        """Open ``metrics.jsonl`` and the boards, once the start is recorded.

        Args:
            after: the step that the run goes on from.
            wandb: a project of Weights & Biases, if they are shown there.
        """
        boards = tensorboard(self.folder, after)
        if wandb is not None:
            began = json.loads((self.folder / "provenance.json").read_text())["starts"][0]["time"]
            shown = {**dataclasses.asdict(self.config), "data": self.data, "hash": self.hash}
            # Neither a moved folder nor another host makes it another run; training it anew does.
            identity = [self.hash, self.name, began]
            boards.append(WeightsAndBiases(wandb, self.folder, shown, identity))
        return Metrics(self.folder, after, boards)

    def check_constants(self, model: Transformer, index: int = 0) -> None:
        """Raise ``UserError`` where what a model has drawn is not what the run has trained with.

        Args:
            model: of one seed.
            index: which of the run's.
        """
        try:
            trained = json.loads((self.folder / "provenance.json").read_text())["constants"]
        except (OSError, ValueError, KeyError):
            return  # of runs that are older than the record
        if trained[index] != constants_hash(model):
            raise UserError(
                f"{self.folder}: its encoding draws numbers that are not trained, and this version "
                f"of JAX draws others than at first ({jax.__version__} now; "
                f"{self.last_start['versions']['jax']} then): go on with that one"
            )

    @property
    def last_start(self) -> dict[str, Any]:
        """What ``provenance.json`` says of the last start."""
        try:
            return json.loads((self.folder / "provenance.json").read_text())["starts"][-1]
        except (OSError, ValueError, KeyError, IndexError):
            raise UserError(
                f"{self.folder}/provenance.json is missing or cannot be read: train the run again"
            ) from None


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        every = sorted(old.keys() | new.keys())
        lines = [_differences(old.get(k), new.get(k), f"{path}.{k}" if path else k) for k in every]
        return [line for some in lines for line in some]
    return [] if old == new else [f"{path} ({old!r} there, {new!r} now)"]


def _read(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    try:
        saved = json.loads((folder / "config.json").read_text())
        return RunConfig.from_json(saved["config"]), saved["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise UserError(
                f"{folder} is no run: it has no config.json; name a folder that train.py made"
            ) from None
        raise UserError(f"{folder}/config.json cannot be read: {error}") from None


def check_run(
    out: Path,
    name: str | None,
    config: RunConfig,
    data: dict[str, Any],
    checkpoint: int | None = None,
) -> Path:
    """Give the folder that a run would live in, if it may; nothing is written.

    Raises:
        UserError: the folder holds another config (the differing keys are named) or is no run, or
            the checkpoint to resume from is not there.
    """
    folder = Path(out) / (config.default_name if name is None else name)
    if (folder / "config.json").exists():
        old_config, old_data = _read(folder)
        differing = _differences(
            {**dataclasses.asdict(old_config), "data identity": old_data},
            {**dataclasses.asdict(config), "data identity": data},
        )
        if differing:
            raise UserError(
                f"{folder} holds a run of another config; differing: {'; '.join(differing)}; "
                "choose another --name or --out"
            )
    elif folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty and no run: choose another --name or --out")
    steps = Checkpoints(folder / "checkpoints").steps()
    if checkpoint is not None and checkpoint not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"--checkpoint {checkpoint}: {folder} has no such step; it has: {there}")
    return folder


def start_run(
    out: Path,
    name: str | None,
    config: RunConfig,
    data: dict[str, Any],
    keep: int = 2,
    always: Iterable[int] = (),
) -> Run:
    """Give the folder of a run: a new one, or an unfinished or finished one of the same config.

    Args:
        out: where runs live.
        name: of the folder; one made from the config if None.
        config: of the run.
        data: identity of what it is trained on.
        keep: how many of the last checkpoints to keep.
        always: steps whose checkpoints are kept besides.

    Raises:
        UserError: as ``check_run``; or another process trains there.
    """
    if keep < 1:
        raise UserError(f"--keep is {keep}: at least 1 checkpoint must be kept")
    if is_first():
        folder = check_run(out, name, config, data)
        if not (folder / "config.json").exists():
            make_folder(folder)
            saved = {"config": dataclasses.asdict(config), "data": data}
            write_json(folder / "config.json", {**saved, "hash": config_hash(config, data)})
        run = Run(folder, config, data, keep, always)
        run.lock()
        wait(f"{folder} is there")
        return run
    folder = Path(out) / (config.default_name if name is None else name)
    wait(f"{folder} is there")
    return Run(folder, config, data, keep, always)


def constants_hash(model: Transformer) -> str | None:
    """Give the SHA-256 of what a model draws and never trains; None where it draws nothing."""
    drawn = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))
    if not drawn:
        return None
    return hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in drawn)).hexdigest()


def without_parameters(make: Callable[[], Transformer]) -> Transformer:
    """Give a model with the shapes of its parameters only, all else being there."""
    model = nnx.eval_shape(make)
    if jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param))):
        # What is drawn and never trained is in no checkpoint: the seed makes it again.
        nnx.update(model, nnx.state(make(), nnx.Not(nnx.Param)))
    return model


def load_model(
    run: Run,
    checkpoint: int | None = None,
    *,
    seed: int | None = None,
    dtype: DType | None = None,
    allow_plugins: bool = False,
) -> Transformer:
    """Read a run's model at a checkpoint, verified.

    Args:
        run: whose.
        checkpoint: the step; the last one unless told otherwise.
        seed: which, of a run that trained several at once.
        dtype: of activations; that of training unless told otherwise.
        allow_plugins: whether code that the config names may be imported.

    Raises:
        UserError: the checkpoint is missing or damaged, what the model draws has changed, or the
            run has no such seed.
        SpecError: the run names a plug-in, and plug-ins are not allowed.
    """
    config = run.config
    if dtype is not None:
        shape = dataclasses.replace(config.model, dtype=dtype)
        config = dataclasses.replace(config, model=shape)
    members = {member.seed: member for member in config.members}
    if seed is None and len(members) == 1:
        seed = config.seed
    if seed not in members:
        raise UserError(
            f"{run.folder} trained the seeds {', '.join(map(str, members))} at once, and "
            f"{'none of them is chosen' if seed is None else f'not {seed}'}: name one of them"
        )
    member, index = members[seed], list(members).index(seed)
    merge, shapes = split(
        without_parameters(lambda: config.model_of(member, allow_plugins=allow_plugins))
    )
    step = config.steps if checkpoint is None else checkpoint
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = abstract(shapes, device)
    if config.seeds > 1:
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (config.seeds, *leaf.shape), leaf.dtype, sharding=device
            ),
            like,
        )
    read = run.checkpoints.restore(step, {"parameters": like})["parameters"]
    if config.seeds > 1:
        read = jax.tree.map(lambda leaf: leaf[index], read)
    model = merge(read)
    run.check_constants(model, index)
    return model


def load(
    folder: str | Path,
    checkpoint: int | None = None,
    *,
    seed: int | None = None,
    allow_plugins: bool = False,
) -> Transformer:
    """Give the model of a finished run, from its folder; see ``load_model``."""
    return load_model(open_run(Path(folder)), checkpoint, seed=seed, allow_plugins=allow_plugins)


def open_folder(folder: Path) -> Run:
    """Open a run, finished or not.

    Raises:
        UserError: the folder is no run.
    """
    folder = Path(folder)
    return Run(folder, *_read(folder))


def open_run(folder: Path) -> Run:
    """Open a finished run, to evaluate it.

    Raises:
        UserError: the folder is no run, or the run is unfinished.
    """
    run = open_folder(folder)
    if not run.finished:
        steps = run.checkpoints.steps()
        reached = f"step {steps[-1]}" if steps else "no checkpoint"
        raise UserError(
            f"{folder} is unfinished ({reached} of {run.config.steps} steps): give its training "
            "command again to finish it"
        )
    return run
