"""Train transformers that differ only in their positional encoding.

    python train.py --encoding rope alibi --model tiny --data manuals-small --out runs

Each encoding becomes a run in the folder OUT/NAME. The same command again leaves finished runs as
they are and resumes unfinished ones; Ctrl-C and SIGTERM save first. To be read top to bottom.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import flax.nnx as nnx
import jax
import numpy as np
import tyro

from posenc import data as datasets
from posenc.boards import check_wandb
from posenc.checkpoints import abstract, write_json
from posenc.cli import parse
from posenc.compilation import keep_compiled
from posenc.continuing import carry_over, check_child, parent_of
from posenc.devices import check_batch_size
from posenc.encodings import EncodingError, make_sampler
from posenc.errors import UserError, one_line_errors
from posenc.optimizer import OptimizerConfig
from posenc.placing import Placer
from posenc.processes import any_of, is_first, join
from posenc.progress import reporting
from posenc.runs import Run, RunConfig, check_run, open_folder, start_run
from posenc.training import Trainer
from posenc.transformer import Transformer, preset
from posenc.watching import flops_a_token, peak_memory, utilisation

# Validation looks beyond the training length, where the encoding can.
EVAL_MULTIPLES = (1, 2, 4)
LOG_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train one run for each encoding, differing in nothing else."""

    encoding: tuple[str, ...]
    """Specs, such as: rope alibi "rope(theta=500000)" "rope*3,nope" my_module:MyEncoding."""
    model: str = "tiny"
    """A preset; see `python -m posenc list`."""
    data: str = "manuals-small"
    """A corpus by name; a glob of .txt or .jsonl files; or token files of the splits, .npy or .bin
    (uint16), with commas: train.bin,valid.bin,test.bin, or globs: "train_*.bin,valid_*.bin"."""
    separator_id: int | None = None
    """Of token files: the token that begins a document; without it (and with --bos none), a
    split is one document."""
    tokenizer: str = "bytes"
    """bytes, or a file of byte-level BPE: a tokenizer.json of Hugging Face's tokenizers, or a
    vocabulary of tiktoken (.tiktoken); `python -m posenc.data tokenizer` trains one."""
    bos: Literal["document", "none"] = "document"
    """Whether every document begins with a BOS token."""
    positions: str = "sequential"
    """Of a window's tokens, such as "randomized(max_position=512)", shape or pose."""
    train_length: int | str = 64
    """Tokens of a training window; or lengths with their shares of all tokens: 64:0.5,256:0.5."""
    lengths: str = "fixed"
    """Of the pieces of a window: "uniform(least=8)", log_uniform or "ramp(first=16)" up to it."""
    packing: Literal["masked", "unmasked", "none"] = "masked"
    """How documents share windows: masked from each other or not, or one document a window."""
    batch_size: int = 32
    """Windows of a step, over all devices; of each seed."""
    accumulate: int = 1
    """Parts of a batch that are computed one after another, to save memory."""
    steps: int = 600
    """Steps of the run."""
    learning_rate: float = 1e-3
    """The peak, after warm-up; it then decays to a tenth."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """How it decays: as a cosine, or linearly over the last --decay-share of the steps."""
    decay_share: float = 0.2
    """Of the steps, with --schedule wsd."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Of projection kernels only."""
    clip_norm: float = 1.0
    """Of the global gradient."""
    z_loss: float = 0.0
    """Weight of the mean of log(Z)^2 in what is minimised, such as 1e-4."""
    encoding_rate: float = 1.0
    """Learning rate of the encoding's own parameters, as a multiple of that of all others."""
    encoding_decay: float | None = None
    """Weight decay of the encoding's own parameters, instead of what each encoding says."""
    seed: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT [INT ...]")] = (0,)
    """Of parameters, data order and dropout; several give a run each."""
    seeds: int = 1
    """How many to train at once, in one compiled step: --seed and those that follow it."""
    init_seed: int | None = None
    """Of all initial parameters but the encoding's, whatever --seed is."""
    data_seed: int | None = None
    """Of the order of the data, whatever --seed is."""
    encoding_seed: int | None = None
    """Of what the encoding draws, whatever --seed is."""
    layers: int | None = None
    """Instead of the preset's; so are the options from here to --dtype."""
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    mlp_width: int | None = None
    qk_norm: bool | None = None
    dropout: float | None = None
    sharing: str | None = None
    """Of a block's weights: all (positions), none, or "groups(copies=8)" of consecutive ones."""
    dtype: Literal["float32", "bfloat16"] | None = None
    remat: Literal["none", "dots", "full"] | None = None
    """What blocks compute again in the backward pass: nothing, all but matrix products, or all."""
    scan: bool = False
    """Run the repeats of the pattern of layers in one loop, which is compiled once."""
    matmul_precision: Literal["default", "high", "highest"] | None = None
    """Of matrix products; the device's own unless given (on some, less than float32)."""
    fsdp: int = 1
    """Devices that share one copy of parameters and optimiser state."""
    coordinator: str | None = None
    """HOST:PORT of the first of several processes; schedulers that JAX knows tell it themselves."""
    processes: int | None = None
    """How many there are, with --coordinator."""
    process: int | None = None
    """Which of them this is, from 0, with --coordinator."""
    eval_every: int = 200
    """Steps between validations, at 1, 2 and 4 times the training length."""
    eval_tokens: int = 16_384
    """Tokens of the validation split at each of these lengths."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints to keep; the best by validation is kept as well."""
    keep_at: tuple[str, ...] = ()
    """Steps whose checkpoints are saved and kept as well: 500, 25%, or log for powers of two."""
    init_from: Path | None = None
    """A run to begin with the weights of: its model, perhaps with another encoding or length."""
    init_step: int | None = None
    """Of its checkpoints; the last one unless given."""
    optimizer: Literal["keep", "reset"] = "reset"
    """With --init-from: whether the optimiser's moments are carried over too."""
    profile: int = 0
    """Steps to trace with JAX's profiler, after the first ten, into RUN/profile."""
    wandb: str | None = None
    """A project of Weights & Biases that shows the metrics too; WANDB_MODE=offline keeps them."""
    checkpoint: int | None = None
    """Resume from this step instead of the last checkpoint; later ones are removed."""
    out: Path = Path("runs")
    """Where runs live."""
    name: str | None = None
    """The run's folder in OUT, instead of one made from what the run is."""


def configs_of(arguments: Arguments) -> list[RunConfig]:
    """Make the config of every run that was asked for."""
    shape, model, parent = preset(arguments.model), arguments.model, None
    if arguments.init_from is not None:
        run, parent = parent_of(
            arguments.init_from, arguments.init_step, arguments.optimizer == "keep"
        )
        shape, model = run.config.model, run.config.preset
        fixed = [
            field.name
            for field in dataclasses.fields(shape)
            if field.name not in ("dropout", "dtype", "remat", "scan")
            and getattr(arguments, field.name, None) not in (None, getattr(shape, field.name))
        ]
        if arguments.model not in (Arguments.model, model):
            fixed.append("model")
        if fixed:
            raise UserError(
                f"--{fixed[0].replace('_', '-')} {getattr(arguments, fixed[0])} is not that of "
                f"--init-from {arguments.init_from}, whose model this run has: leave it out"
            )
    elif arguments.init_step is not None or arguments.optimizer != "reset":
        raise UserError("--init-step and --optimizer are of --init-from, which is not given")
    given = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(shape)
        if getattr(arguments, field.name, None) is not None
    }
    length, lengths = datasets.read_train_length(arguments.train_length)
    if lengths != "fixed" and arguments.lengths != "fixed":
        raise UserError(
            f"--train-length {arguments.train_length} and --lengths {arguments.lengths} say two "
            "things: give one of them"
        )
    lengths = arguments.lengths if lengths == "fixed" else lengths
    vocabulary = datasets.tokenizer(arguments.tokenizer).vocab_size
    shape = dataclasses.replace(shape, vocab_size=vocabulary, **given)
    configs = [
        RunConfig(
            encoding=encoding,
            preset=model,
            parent=parent,
            model=shape,
            data=arguments.data,
            separator_id=arguments.separator_id,
            tokenizer=arguments.tokenizer,
            bos=arguments.bos,
            positions=arguments.positions,
            train_length=length,
            lengths=lengths,
            packing=arguments.packing,
            batch_size=arguments.batch_size,
            steps=arguments.steps,
            seed=seed,
            seeds=arguments.seeds,
            init_seed=arguments.init_seed,
            data_seed=arguments.data_seed,
            encoding_seed=arguments.encoding_seed,
            accumulate=arguments.accumulate,
            matmul_precision=arguments.matmul_precision,
            optimizer=OptimizerConfig(
                **{
                    field.name: getattr(arguments, field.name)
                    for field in dataclasses.fields(OptimizerConfig)
                    if hasattr(arguments, field.name)
                }
            ),
            eval_every=arguments.eval_every,
            eval_tokens=arguments.eval_tokens,
            checkpoint_every=arguments.checkpoint_every,
        )
        for seed in arguments.seed
        for encoding in arguments.encoding
    ]
    return list(dict.fromkeys(configs))  # a spec given twice is one run


def kept_steps(keep_at: Sequence[str], steps: int) -> frozenset[int]:
    """Give the steps that ``--keep-at`` names.

    Raises:
        UserError: it is no step of the run.
    """
    chosen: set[int] = set()
    for text in keep_at:
        if text == "log":
            chosen.update(2**n for n in range(steps.bit_length()))
            continue
        try:
            step = float(text[:-1]) / 100 * steps if text.endswith("%") else int(text)
        except ValueError:
            step = 0
        if not 1 <= step <= steps:
            raise UserError(
                f"--keep-at {text}: give a step from 1 to {steps}, a share of them such as 25%, or "
                "log"
            )
        chosen.add(round(step))
    return frozenset(step for step in chosen if step <= steps)


def scanned(model: Transformer) -> str:
    """Say which layers ``--scan`` runs in a loop."""
    repeats, layers = model.repeats(), model.config.layers
    if repeats is None:
        return f"no two of the {layers} layer(s) in a row are alike: --scan changes nothing"
    rest = layers - repeats.period * repeats.count
    pattern = f"{repeats.count} repeats of {repeats.period} layer(s)"
    return f"scan over {pattern}" + (f", the other {rest} unrolled" if rest else "")


class Stop:
    """Whether Ctrl-C or SIGTERM came; a second one ends the process at once."""

    def __enter__(self) -> Stop:
        self.signal: int | None = None
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)


def together(batches: Sequence[dict], several: bool) -> dict:
    """Stack the batches of several seeds, ``[N, B, ...]``; give the one of a single seed."""
    return jax.tree.map(lambda *own: np.stack(own), *batches) if several else batches[0]


def validation_batches(stream: datasets.TokenStream, config: RunConfig) -> dict[int, dict]:
    """Give the fixed validation windows by length; the same tokens a length, as far as they go."""
    batches = {}
    for multiple in EVAL_MULTIPLES:
        length = multiple * config.train_length
        try:
            count = max(1, config.eval_tokens // length)
            batches[length] = datasets.fixed_windows(stream, length, count)
        except UserError:
            if multiple == 1:
                raise
    return batches


def train(
    run: Run,
    batches: Sequence[datasets.Batches],
    valid: dict[int, dict],
    resume: int | None,
    fsdp: int,
    profile: int,
    wandb: str | None,
) -> None:
    """Train one run to its end: one seed, or several at once.

    Args:
        run: to be trained.
        batches: of each seed.
        valid: validation windows by length.
        resume: the step to go on from, if not the last that was saved.
        fsdp: devices that share a copy of the parameters.
        profile: steps to trace.
        wandb: a project of Weights & Biases, if it shows the metrics too.

    Raises:
        SystemExit: a signal came; what was reached is saved.
        FloatingPointError: the loss was not finite, of some seed.
        UserError: a checkpoint is damaged or could not be written.
    """
    config, checkpoints, members = run.config, run.checkpoints, run.config.members
    models = [config.model_of(member) for member in members]
    model, several = models[0], config.seeds > 1
    trainer = Trainer(
        models if several else model,
        config.optimizer,
        config.steps,
        [member.seed for member in members] if several else config.seed,
        fsdp=fsdp,
        accumulate=config.accumulate,
    )
    state = trainer.start()

    # Where to start: the checkpoint that was asked for, else the last one, else the beginning.
    first = resume if resume is not None else max(checkpoints.steps(), default=0)
    if first:
        state = checkpoints.restore(first, abstract(state, trainer.shardings))
        checkpoints.remove_after(first)
    elif config.parent is not None:
        state, carried = carry_over(open_folder(Path(config.parent.run)), config, state)
        print(f"{run.folder}: from {config.parent.run} at step {config.parent.step}: {carried}")
    sampler = make_sampler(config.positions)
    cost = flops_a_token(model, config.train_length, sampler)
    run.record_start(models, first or None, cost)
    if is_first():
        run.record_distances(batches)
    metrics = run.metrics(first, wandb) if is_first() else None

    tokens_a_step = config.batch_size * config.train_length
    tokens_at_once = tokens_a_step * config.seeds
    limit = model.max_position
    placer = Placer(model.encoding, sampler)

    def defined(length: int) -> bool:
        """Say whether every position of a validation window has a representation."""
        try:
            end = sampler.extent(length, training=False)
        except EncodingError:
            return False
        return limit is None or end <= limit

    # Windows whose positions have no representation are left empty: nothing is made up for them.
    valid = {
        length: together(
            [
                datasets.placed(
                    batch, placer, range(len(batch["inputs"])), (member.data,), training=False
                )
                for member in members
            ],
            several,
        )
        if defined(length)
        else {}
        for length, batch in valid.items()
    }
    began, pending, valid_loss, stopping = time.monotonic(), None, None, False
    earlier = 0.0 if metrics is None else metrics.seconds
    going = dict(enumerate(members))
    if several:
        taken = np.asarray(state["step"])
        going = {index: member for index, member in going.items() if taken[index] >= 0}
    failed = [f"seed {m.seed}, earlier" for index, m in enumerate(members) if index not in going]

    def check(done: int, values: dict) -> dict[str, np.ndarray]:
        """Fetch a step's numbers, ``[N]`` each, and stop what is not finite."""
        found = {name: np.atleast_1d(np.asarray(value)) for name, value in values.items()}
        for index, member in list(going.items()):
            loss, norm = found["loss"][index], found["gradient_norm"][index]
            if math.isfinite(loss) and math.isfinite(norm):
                continue
            del going[index]
            what = f"loss {loss} and gradient norm {norm} at step {done}"
            if several:
                failed.append(f"seed {member.seed}, {what}")
                report.say(f"{run.name}: seed {member.seed} is frozen: {what}")
            if not going:
                checkpoints.finish()
                good = checkpoints.steps()
                what = "; ".join(failed) if several else what
                raise FloatingPointError(
                    f"{run.folder}: {what}; last good "
                    f"checkpoint: {f'step {good[-1]}' if good else 'none'}; config: "
                    f"{run.folder / 'config.json'}; try a lower --learning-rate under another "
                    "--name"
                )
        return found

    def write(done: int, numbers: dict[str, Any]) -> None:
        """Write a line of metrics, of each seed that goes on."""
        if metrics is None:
            return
        for index, member in going.items():
            own = {
                name: float(value[index]) if isinstance(value, np.ndarray) else value
                for name, value in numbers.items()
            }
            metrics.write(done, seed=member.seed if several else None, **own)

    def mean(values: np.ndarray) -> float:
        return float(np.mean([values[index] for index in going]))

    traced = range(first + 11, min(first + 10 + profile, config.steps) + 1)

    def fetch(step: int) -> dict:
        return together([own[step] for own in batches], several)

    with (
        Stop() as stop,
        reporting(run.name, config.steps, first) as report,
        ThreadPoolExecutor(1) as beside,
    ):
        coming = beside.submit(fetch, first)
        for done in range(first + 1, config.steps + 1):
            if traced and done == traced[0]:
                jax.profiler.start_trace(run.folder / "profile")
            # The next batch is made while the device works on this one.
            batch = coming.result()
            if done < config.steps:
                coming = beside.submit(fetch, done)
            state, values = trainer.step(state, batch)
            if traced and done == traced[-1]:
                jax.block_until_ready(values)
                jax.profiler.stop_trace()
            # While the device works on this step, deal with the values of the step before.
            if pending is not None:
                check(done - 1, pending)
            pending = values
            last = done == config.steps

            if done % LOG_EVERY == 0 or last:
                found = check(done, values)
                passed = time.monotonic() - began
                rate = (done - first) * tokens_at_once / passed
                costs = {
                    "seconds": round(earlier + passed, 3),
                    "tokens": done * tokens_a_step,
                    "tokens_per_second": round(rate),
                    "tokens_per_second_per_device": round(rate / jax.device_count()),
                    "model_flops_utilisation": utilisation(rate * cost),
                    "peak_memory_bytes": peak_memory(),
                }
                known = {name: value for name, value in costs.items() if value is not None}
                write(done, {**found, **known})
                report.update(done, f"loss {mean(found['loss']):.3f}, {rate:,.0f} tokens/s,")

            # A checkpoint is saved with its loss, by which the best one is known.
            valid_loss = None
            saves = done % config.checkpoint_every == 0 or last or done in checkpoints.always
            if done % config.eval_every == 0 or saves:
                check(done, values)
                # Beyond an encoding's table there is no loss to report, and none is made up.
                losses = {
                    length: np.atleast_1d(trainer.nll(state, batch)) if batch else None
                    for length, batch in valid.items()
                }
                within = losses[config.train_length]
                valid_loss = None if within is None else mean(within)
                write(
                    done,
                    {
                        **{f"valid_nll_{n}": loss for n, loss in losses.items()},
                        **trainer.learned(state),
                    },
                )
                shown = ", ".join(
                    f"{mean(loss):.3f} at {n}" if loss is not None else f"undefined at {n}"
                    for n, loss in losses.items()
                )
                report.say(f"{run.name}: step {done}, validation loss {shown}")

            # All processes stop at the same step, whichever of them was told to.
            ask = done % LOG_EVERY == 0 or jax.process_count() == 1
            stopping = ask and any_of(stop.signal is not None)
            if saves or stopping:
                check(done, values)
                checkpoints.save(done, state, valid_loss)
            if stopping:
                break
        checkpoints.finish()
        if metrics is not None:
            metrics.close()
        if stopping:
            report.say(f"{run.folder}: saved step {done}; give the same command to go on")
            raise SystemExit(128 + (stop.signal or signal.SIGTERM))
        if failed:
            raise FloatingPointError(
                f"{run.folder}: {'; '.join(failed)}: frozen there, as they were before; the other "
                "seeds are trained; try a lower --learning-rate under another --name"
            )


def main(arguments: Arguments) -> list[Path]:
    """Train whatever is not trained yet, and give the folders of all runs."""
    join(arguments.coordinator, arguments.processes, arguments.process)
    # --- Everything that can be wrong is found before a folder is made -------------------------
    configs = configs_of(arguments)
    for option, value in (("--name", arguments.name), ("--checkpoint", arguments.checkpoint)):
        if value is not None and len(configs) > 1:
            raise UserError(
                f"{option} {value} is of one run, and these are {len(configs)}: "
                "leave it out, or name one encoding and one seed"
            )
    for config in configs:
        model = nnx.eval_shape(lambda c=config: Transformer(c.model, c.encoding, c.train_length))
        # Training feeds every position of a window: one that the encoding lacks is refused here.
        end = make_sampler(config.positions).extent(config.train_length, training=True)
        model.check_positions(np.arange(end))
        if config.model.scan:
            print(f"{config.encoding}: {scanned(model)}")
    always = kept_steps(arguments.keep_at, arguments.steps)
    check_wandb(arguments.wandb)
    check_batch_size(arguments.batch_size, arguments.fsdp, arguments.seeds, arguments.accumulate)
    if arguments.steps <= arguments.warmup_steps:
        print(
            f"note: all {arguments.steps} steps lie within the warm-up of "
            f"{arguments.warmup_steps}: the learning rate does not reach its decay (--warmup-steps)"
        )
    print(f"compiled programs are kept in {keep_compiled()}")

    # --- Data: the same for every run -----------------------------------------------------------
    corpus = datasets.open_data(arguments.data, arguments.separator_id)
    tokenizer = datasets.tokenizer(arguments.tokenizer)
    identity = datasets.identity(corpus, tokenizer, arguments.bos)
    streams = {
        name: datasets.token_stream(corpus, name, tokenizer, arguments.bos)
        for name in datasets.SPLITS  # test too: an evaluation will want it
    }
    windows = datasets.PACKINGS[arguments.packing](streams["train"], configs[0].train_length)
    valid = validation_batches(streams["valid"], configs[0])
    print(
        f"data: {corpus.name}, {datasets.describe_split(corpus)}; "
        f"{len(streams['train'].tokens):,} training tokens"
    )

    for config in configs if is_first() else ():
        if config.parent is not None:
            check_child(open_folder(Path(config.parent.run)), config, identity)
        check_run(arguments.out, arguments.name, config, identity, arguments.checkpoint)

    # --- One run after the other ------------------------------------------------------------------
    folders, failures = [], []
    for config in configs:
        run = start_run(arguments.out, arguments.name, config, identity, arguments.keep, always)
        folders.append(run.folder)
        if is_first():
            datasets.keep_tokenizer(tokenizer, run.folder / "tokenizer")
        if run.finished and arguments.checkpoint is None:
            print(f"{run.folder}: finished before, left as it is")
            continue
        model = nnx.eval_shape(lambda c=config: Transformer(c.model, c.encoding, c.train_length))
        placer = Placer(model.encoding, make_sampler(config.positions))
        batches = [
            datasets.Batches(
                windows,
                config.batch_size,
                member.data,
                process_index=jax.process_index(),
                process_count=jax.process_count(),
                placer=placer,
                regime=datasets.make_regime(config.lengths, config.train_length),
                steps=config.steps,
            )
            for member in config.members
        ]
        if is_first():
            (run.folder / "diverged.json").unlink(missing_ok=True)  # of an earlier attempt
        try:
            with jax.default_matmul_precision(config.matmul_precision):
                train(
                    run,
                    batches,
                    valid,
                    arguments.checkpoint,
                    arguments.fsdp,
                    arguments.profile,
                    arguments.wandb,
                )
        except FloatingPointError as error:
            failures.append(str(error))
            if is_first():
                write_json(run.folder / "diverged.json", {"reason": str(error)})
            print(f"posenc: {error}", file=sys.stderr)
        finally:
            run.unlock()
    if failures:
        raise SystemExit(1)
    return folders


if __name__ == "__main__":
    with one_line_errors():
        main(parse(Arguments, __doc__))
