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
from pathlib import Path
from typing import Annotated, Literal

import flax.nnx as nnx
import jax
import numpy as np
import tyro

from posenc import data as datasets
from posenc.checkpoints import abstract
from posenc.cli import parse
from posenc.compilation import keep_compiled
from posenc.encodings import EncodingError, make_sampler
from posenc.errors import UserError, one_line_errors
from posenc.placing import Placer
from posenc.progress import reporting
from posenc.runs import Metrics, Run, RunConfig, check_run, start_run
from posenc.training import OptimizerConfig, Trainer, check_batch_size
from posenc.transformer import Transformer, preset

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
    (uint16), with commas: train.bin,valid.bin,test.bin."""
    separator_id: int | None = None
    """Of token files: the token that begins a document; without it (and with --bos none), a file
    is one document."""
    tokenizer: str = "bytes"
    """bytes, or a file of byte-level BPE: a tokenizer.json of Hugging Face's tokenizers, or a
    vocabulary of tiktoken (.tiktoken); `python -m posenc.data tokenizer` trains one."""
    bos: Literal["document", "none"] = "document"
    """Whether every document begins with a BOS token."""
    positions: str = "sequential"
    """Of a window's tokens, such as "randomized(max_position=512)", shape or pose."""
    train_length: int = 64
    """Tokens of a training window."""
    batch_size: int = 32
    """Windows of a step, over all devices."""
    steps: int = 600
    """Steps of the run."""
    learning_rate: float = 1e-3
    """The peak, after warm-up; it then decays as a cosine to a tenth."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Of projection kernels only."""
    clip_norm: float = 1.0
    """Of the global gradient."""
    seed: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT [INT ...]")] = (0,)
    """Of parameters, data order and dropout; several give a run each."""
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
    eval_every: int = 200
    """Steps between validations, at 1, 2 and 4 times the training length."""
    eval_tokens: int = 16_384
    """Tokens of the validation split at each of these lengths."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints to keep; the best by validation is kept as well."""
    checkpoint: int | None = None
    """Resume from this step instead of the last checkpoint; later ones are removed."""
    out: Path = Path("runs")
    """Where runs live."""
    name: str | None = None
    """The run's folder in OUT, instead of one made from what the run is."""


def configs_of(arguments: Arguments) -> list[RunConfig]:
    """Make the config of every run that was asked for."""
    shape = preset(arguments.model)
    given = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(shape)
        if getattr(arguments, field.name, None) is not None
    }
    vocabulary = datasets.tokenizer(arguments.tokenizer).vocab_size
    shape = dataclasses.replace(shape, vocab_size=vocabulary, **given)
    configs = [
        RunConfig(
            encoding=encoding,
            preset=arguments.model,
            model=shape,
            data=arguments.data,
            separator_id=arguments.separator_id,
            tokenizer=arguments.tokenizer,
            bos=arguments.bos,
            positions=arguments.positions,
            train_length=arguments.train_length,
            batch_size=arguments.batch_size,
            steps=arguments.steps,
            seed=seed,
            optimizer=OptimizerConfig(
                learning_rate=arguments.learning_rate,
                warmup_steps=arguments.warmup_steps,
                weight_decay=arguments.weight_decay,
                clip_norm=arguments.clip_norm,
            ),
            eval_every=arguments.eval_every,
            eval_tokens=arguments.eval_tokens,
            checkpoint_every=arguments.checkpoint_every,
        )
        for seed in arguments.seed
        for encoding in arguments.encoding
    ]
    return list(dict.fromkeys(configs))  # a spec given twice is one run


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


def train(run: Run, batches: datasets.Batches, valid: dict[int, dict], resume: int | None) -> None:
    """Train one run to its end.

    Raises:
        SystemExit: a signal came; what was reached is saved.
        FloatingPointError: the loss was not finite.
        UserError: a checkpoint is damaged or could not be written.
    """
    config, checkpoints = run.config, run.checkpoints
    model = Transformer(config.model, config.encoding, config.train_length, seed=config.seed)
    trainer = Trainer(model, config.optimizer, config.steps, config.seed)
    state = trainer.start()

    # Where to start: the checkpoint that was asked for, else the last one, else the beginning.
    first = resume if resume is not None else max(checkpoints.steps(), default=0)
    if first:
        state = checkpoints.restore(first, abstract(state, trainer.replicated))
        checkpoints.remove_after(first)
    run.record_start(model, first or None)
    metrics = Metrics(run.folder, after=first)

    tokens_a_step = config.batch_size * config.train_length
    limit, sampler = model.max_position, make_sampler(config.positions)
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
        length: datasets.placed(
            batch, placer, range(len(batch["inputs"])), (config.seed,), training=False
        )
        if defined(length)
        else {}
        for length, batch in valid.items()
    }
    began, pending, valid_loss = time.monotonic(), None, None

    def check(done: int, values: dict) -> tuple[float, float]:
        """Fetch a step's loss and gradient norm, and stop the run if they are not finite."""
        loss, norm = float(values["loss"]), float(values["gradient_norm"])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            checkpoints.finish()
            good = checkpoints.steps()
            raise FloatingPointError(
                f"{run.folder}: loss {loss} and gradient norm {norm} at step {done}; last good "
                f"checkpoint: {f'step {good[-1]}' if good else 'none'}; config: "
                f"{run.folder / 'config.json'}; try a lower --learning-rate under another --name"
            )
        return loss, norm

    with Stop() as stop, reporting(run.name, config.steps, first) as report:
        for done in range(first + 1, config.steps + 1):
            state, values = trainer.step(state, batches[done - 1])
            # While the device works on this step, deal with the values of the step before.
            if pending is not None:
                check(done - 1, pending)
            pending = values
            last = done == config.steps

            if done % LOG_EVERY == 0 or last:
                loss, norm = check(done, values)
                rate = (done - first) * tokens_a_step / (time.monotonic() - began)
                metrics.write(
                    done,
                    loss=loss,
                    gradient_norm=norm,
                    learning_rate=float(values["learning_rate"]),
                    tokens=done * tokens_a_step,
                    tokens_per_second=round(rate),
                )
                report.update(done, f"loss {loss:.3f}, {rate:,.0f} tokens/s,")

            # A checkpoint is saved with its loss, by which the best one is known.
            valid_loss, saves = None, done % config.checkpoint_every == 0 or last
            if done % config.eval_every == 0 or saves:
                check(done, values)
                # Beyond an encoding's table there is no loss to report, and none is made up.
                losses = {
                    length: trainer.nll(state, batch) if batch else None
                    for length, batch in valid.items()
                }
                valid_loss = losses[config.train_length]
                metrics.write(done, **{f"valid_nll_{n}": loss for n, loss in losses.items()})
                shown = ", ".join(
                    f"{loss:.3f} at {n}" if loss is not None else f"undefined at {n}"
                    for n, loss in losses.items()
                )
                report.say(f"{run.name}: step {done}, validation loss {shown}")

            if saves or stop.signal is not None:
                check(done, values)
                checkpoints.save(done, state, valid_loss)
            if stop.signal is not None:
                break
        checkpoints.finish()
        metrics.close()
        if stop.signal is not None:
            report.say(f"{run.folder}: saved step {done}; give the same command to go on")
            raise SystemExit(128 + stop.signal)


def main(arguments: Arguments) -> list[Path]:
    """Train whatever is not trained yet, and give the folders of all runs."""
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
    check_batch_size(arguments.batch_size)
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
    windows = datasets.Windows(streams["train"], arguments.train_length)
    valid = validation_batches(streams["valid"], configs[0])
    print(
        f"data: {corpus.name}, {datasets.describe_split(corpus)}; "
        f"{len(streams['train'].tokens):,} training tokens"
    )

    for config in configs:
        check_run(arguments.out, arguments.name, config, identity, arguments.checkpoint)

    # --- One run after the other ------------------------------------------------------------------
    folders, failures = [], []
    for config in configs:
        run = start_run(arguments.out, arguments.name, config, identity, arguments.keep)
        folders.append(run.folder)
        datasets.keep_tokenizer(tokenizer, run.folder / "tokenizer")
        if run.finished and arguments.checkpoint is None:
            print(f"{run.folder}: finished before, left as it is")
            continue
        model = nnx.eval_shape(lambda c=config: Transformer(c.model, c.encoding, c.train_length))
        batches = datasets.Batches(
            windows,
            config.batch_size,
            config.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            placer=Placer(model.encoding, make_sampler(config.positions)),
        )
        try:
            train(run, batches, valid, arguments.checkpoint)
        except FloatingPointError as error:
            failures.append(str(error))
            print(f"posenc: {error}", file=sys.stderr)
    if failures:
        raise SystemExit(1)
    return folders


if __name__ == "__main__":
    with one_line_errors():
        main(parse(Arguments, __doc__))
