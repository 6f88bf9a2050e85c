"""docs/writing-an-encoding.md is true: its code runs, and what it says of the checks is so."""

import ast
import functools
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from posenc import conformance as checks
from posenc.__main__ import main
from posenc.encodings import REGISTRY, PositionalEncoding

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "writing-an-encoding.md").read_text()
EXAMPLES = ("RootBias", "EvenRotation", "ForgetGate", "KeyPlace")
TEST_FILE = "# test_my_encodings.py\n"
# What takes longest, and the one example that is not spared the first of the two.
SLOW = (checks.blocks_equal_dense, checks.memory_grows_with_the_length)
QUICK = [check for check in checks.CHECKS if check not in SLOW]


def blocks(language):
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", TEXT, re.DOTALL | re.MULTILINE)


def table(head):
    """Give the rows of the table whose head begins so."""
    lines = TEXT[TEXT.index(f"| {head} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The two files that the document tells the reader to write, where Python finds them."""
    folder = tmp_path_factory.mktemp("written")
    code = blocks("python")
    tests = [block for block in code if block.startswith(TEST_FILE)]
    assert len(tests) == 1
    (folder / "test_my_encodings.py").write_text(tests[0])
    code.remove(tests[0])
    (folder / "my_encodings.py").write_text("\n\n".join(code))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for name in ("my_encodings", "test_my_encodings"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def written(folder):
    return importlib.import_module("my_encodings")


def run(words, folder, cwd=ROOT):
    """Run one command as the document's reader would, with an own file on the path."""
    path = f"{folder}:{ROOT / 'tests'}:{ROOT}"
    words = ["env", f"PYTHONPATH={path}", *(sys.executable if w == "python" else w for w in words)]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=900)


# The examples.


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_holds_the_laws(name, written):
    some = [*QUICK, checks.blocks_equal_dense] if name == "ForgetGate" else QUICK
    results = list(checks.conformance(f"my_encodings:{name}", some))
    assert not {result.check: result.error for result in results if result.error}
    silent = {result.check for result in results if not result.applies}
    expected = set() if name == "KeyPlace" else {"out_of_range_is_loud"}
    if name == "ForgetGate":  # it reads none
        expected.add("positions_are_data")
    if name == "EvenRotation":  # it has no parameters
        expected.add("layers_share_or_do_not_as_is_said")
    assert silent == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXAMPLES, "PlainForgetGate"])
def test_an_example_holds_the_laws_that_take_longest(name, written):
    some = SLOW if name in EXAMPLES else checks.CHECKS
    results = list(checks.conformance(f"my_encodings:{name}", some))
    assert not {result.check: result.error for result in results if result.error}
    assert results[-1].applies


def test_the_examples_are_all_there_is(written):
    defined = {
        name
        for name, value in vars(written).items()
        if isinstance(value, type) and issubclass(value, PositionalEncoding)
    }
    assert defined == {*EXAMPLES, "PlainForgetGate"}


def test_the_definition_tests_pass(folder, written):
    tests = importlib.import_module("test_my_encodings")
    for positions in tests.POSITIONS:
        tests.test_root_bias(positions)
        for name in ("ForgetGate", "PlainForgetGate"):
            tests.test_forget_gate(name, positions)
    tests.test_forget_gate_does_not_drift()
    # The last of them is there for this one, which all checks let pass.
    drift = tests.drift("wrong_encodings:SumsForever")
    assert 0.003 < drift < 0.03
    assert "the drift is about 0.01" in TEXT


def test_the_definition_tests_notice_another_formula(folder, written):
    tests = importlib.import_module("test_my_encodings")
    positions = tests.POSITIONS[0]
    kept = written.RootBias.logits
    try:
        written.RootBias.logits = lambda self, logits, scores, queries, keys, visible, carry: (
            kept(self, logits, scores, queries, keys, visible, carry)[0] * (1 + 1e-5),
            carry,
        )
        with pytest.raises(AssertionError):
            tests.test_root_bias(positions)
    finally:
        written.RootBias.logits = kept


def test_a_table_ends_loudly_and_is_extended_by_name(written):
    import jax
    import jax.numpy as jnp

    import posenc

    config = posenc.TransformerConfig(vocab_size=31, width=32, heads=4)
    model = posenc.Transformer(config, "my_encodings:KeyPlace", 8)
    tokens = jnp.zeros((1, 9), jnp.int32)
    for positions, way in (
        (jnp.arange(9)[None], "stay below 8.*key_place.*clamp"),
        (jnp.arange(9.0)[None] / 2, "position 0.5 has no .*key_place.*give whole positions"),
    ):
        with pytest.raises(posenc.PositionOutOfRange, match=way):
            model(tokens, positions)
    dims = posenc.Dimensions(32, 4, 8, 8)
    part = posenc.build("my_encodings:KeyPlace", 1, dims, jax.random.key(0)).at(0)
    longer = part.extended("clamp", 11)
    assert longer.max_position == 11
    np.testing.assert_array_equal(longer.table[:8], part.table[...])
    np.testing.assert_array_equal(longer.table[8:], np.tile(part.table[7], (3, 1)))
    with pytest.raises(ValueError, match="no extension policy 'wrap'; it has: clamp"):
        part.extended("wrap", 11)


# What goes wrong.

# Of every row of the document's table: the class, the check and what it says.
WRONG = [
    ("LeaksTheFuture", "later_tokens_change_nothing", "the first 16 rows, with other tokens after"),
    ("LeaksTheFuture", "no_gradient_from_the_future", "row 24 depends on later slots"),
    ("ForgetsTheOffset", "cached_equals_full", "a full pass and decoding token by token: differ"),
    ("RoundsPositions", "bfloat16_rounds_once", "what is rotated in bfloat16 is off by"),
    ("RoundsAllPositions", "shift_changes_what_is_said", "a logit changes by"),
    ("CountsFromTheEnd", "cached_equals_full", "a full pass and decoding token by token: differ"),
    ("CountsFromTheEnd", "packed_equals_separate", "the first of two packed sequences: differ by"),
    ("DividesByTheLength", "blocks_equal_dense", "attention in blocks and at once: differ by"),
    (
        "KeepsAcrossBorders",
        "packed_equals_separate",
        "two packed sequences and the same on the cache",
    ),
    (
        "GrowsWithTheLastPosition",
        "positions_are_data",
        "at positions that jump, and the same on the",
    ),
    ("SumsInTheFeatures", "cached_equals_full", "a full pass and decoding token by token: differ"),
    ("MakesParametersLate", "restored_equals_saved", "which are never trained and not saved"),
    ("RootOfZero", "blocks_equal_dense", "gradient of encoding.parts.0.scale is not finite"),
    ("LogOfZero", "blocks_equal_dense", "gradient of encoding.parts.0.scale is not finite"),
]


@pytest.mark.fast
def test_the_table_of_mistakes_is_what_is_tested():
    shown = [(line.replace(" ", "_"), said) for _, line, said in table("mistake")]
    assert len(shown) == len(WRONG)
    for (line, said), (_, check, tested) in zip(shown, WRONG, strict=True):
        assert line == check
        assert tested in said


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "LogOfZero" else ())
        for name in dict.fromkeys(name for name, _, _ in WRONG)
    ],
)
def test_a_wrong_encoding_is_broken_in_a_line_that_says_how(name, monkeypatch, capsys):
    said = {check: text for cls, check, text in WRONG if cls == name}
    few = [check for check in checks.CHECKS if check.__name__ in said]
    conformance = functools.partial(checks.conformance, checks=few)
    monkeypatch.setattr("posenc.__main__.conformance", conformance)
    monkeypatch.setattr(sys, "argv", ["posenc", "check", f"wrong_encodings:{name}"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(said)
    for check, line, why in zip(few, lines[::2], lines[1::2], strict=True):
        shown = check.__name__.replace("_", " ")
        assert re.fullmatch(rf"law +{checks.CHECKS[check]}  {shown} +BROKEN", line)
        assert why.startswith("        ")
        assert said[check.__name__] in why


def test_nothing_is_said_of_the_positions_of_an_encoding_that_reads_slots():
    (result,) = checks.conformance("wrong_encodings:ReadsSlots", [checks.positions_are_data])
    assert (result.error, result.applies) == (None, False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SumsForever", "EndsInSilence"])
def test_what_the_checks_cannot_see_passes_as_is_said(name):
    every = [*QUICK, checks.blocks_equal_dense]
    results = list(checks.conformance(f"wrong_encodings:{name}", every))
    assert not {result.check: result.error for result in results if result.error}


@pytest.mark.fast
def test_a_safe_number_goes_in_before_the_function_as_is_said():
    import jax
    import jax.numpy as jnp

    d = jnp.zeros(())
    some = jnp.where(d > 0, d, 1)
    after = jax.grad(lambda scale: jnp.where(d > 0, jnp.sqrt(scale * d), 0))(1.0)
    before = jax.grad(lambda scale: jnp.where(d > 0, jnp.sqrt(scale * some), 0))(1.0)
    assert np.isnan(after)
    assert before == 0


@pytest.mark.slow
def test_the_broken_example_prints_what_is_shown(folder, tmp_path):
    code = (folder / "my_encodings.py").read_text()
    # As the document says, in the second example.
    right = "angles = positions.astype(jnp.float32)"
    assert code.count(right) == 1
    wrong = "angles = jnp.arange(positions.shape[1])[None].astype(jnp.float32)"
    (tmp_path / "my_encodings.py").write_text(code.replace(right, wrong))
    done = run(["python", "-m", "posenc", "check", "my_encodings:EvenRotation"], tmp_path)
    assert done.returncode == 1, done.stderr
    (shown,) = (block for block in blocks("text") if "BROKEN" in block)

    def masked(text):
        return re.sub(r"differ by [\d.]+", "differ by N", text)

    assert masked(done.stdout) == masked(shown)


# The commands.


def commands():
    """Give the words of every command, in order."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines]


def with_options(words, **changed):
    """Give a command with some options' values replaced, or added."""
    for name, value in changed.items():
        option = "--" + name.replace("_", "-")
        if option in words:
            first = words.index(option)
            after = [i for i, word in enumerate(words) if i > first and word.startswith("--")]
            words = words[:first] + words[after[0] if after else len(words) :]
        words = [*words, option, *map(str, value if isinstance(value, tuple) else (value,))]
    return words


@pytest.mark.slow
def test_every_command_works_in_small(folder, tmp_path):
    """All of them, one after another in one folder, with little to do."""
    done = []
    for words in commands():
        if words[0] in (".", "export"):
            continue
        if words[:2] == ["python", "train.py"]:
            words = with_options(
                words,
                encoding=("my_encodings:RootBias", "my_encodings:KeyPlace"),
                seed=0,
                steps=4,
                model="nano",
                train_length=16,
                batch_size=4,
                eval_tokens=64,
            )
        elif words[:4] == ["python", "-m", "eval", "score"]:
            words = with_options(words, lengths=(16, 32), tokens_per_document=64)
        elif "check" in words:
            continue  # what it prints is tested beside
        # The shell's part: files are where the reader stands.
        words = [
            str(path) if word.startswith("runs/") else word
            for word in words
            for path in (sorted(tmp_path.glob(word)) if word.startswith("runs/") else [None])
        ]
        words = [str(ROOT / word) if word == "train.py" else word for word in words]
        words = [str(folder / word) if word.startswith("test_") else word for word in words]
        result = run(words, folder, cwd=tmp_path)
        assert result.returncode == 0, (words, result.stdout, result.stderr)
        done.append((words, result.stdout))
    programs = ["posenc", "pytest", "train.py", "eval", "eval", "eval"]
    assert [Path(words[2 if words[1] == "-m" else 1]).name for words, _ in done] == programs
    assert "encoding.parts.0.slopes [4]" in done[0][1]
    assert "10 passed" in done[1][1]
    assert re.search(r"my_encodings:KeyPlace +│ +\d.\d+ +│ +undefined", done[3][1])
    assert re.search(r"extend=clamp +│ +\d.\d+ +│ +\d.\d+", done[4][1])
    assert {path.name for path in (tmp_path / "both").iterdir()} >= {"table.md", "figure.png"}


@pytest.mark.fast
def test_commands_and_files_that_are_named_exist():
    import train
    from eval.__main__ import Score

    known = {
        "train.py": {"--" + n.replace("_", "-") for n in train.Arguments.__dataclass_fields__},
        "score": {"--" + n.replace("_", "-") for n in Score.__dataclass_fields__},
    }
    for words in commands():
        for program, options in known.items():
            if program in words:
                assert {word for word in words if word.startswith("--")} <= options
    named = re.findall(r"`((?:posenc|tests|docs)/[\w/]+\.py)`", TEXT)
    kin = re.findall(r"`([a-z]+\.py)` (?:acts|on)", TEXT)
    named += [f"posenc/encodings/{name}" for name in kin]
    assert len(named) > 8
    for path in named:
        assert (ROOT / path).is_file(), path
    assert blocks("diff")
    for block in blocks("diff"):
        for line in block.splitlines():
            if line.strip() and not line.strip().startswith("+"):
                assert line.strip() in (ROOT / "posenc/encodings/registry.py").read_text()
    assert "root_bias" not in REGISTRY


# What is said of the contract.


@pytest.mark.fast
def test_every_check_is_explained_in_its_order():
    names = [check.__name__.replace("_", " ") for check in checks.CHECKS]
    assert [row[0] for row in table("line")] == names


@pytest.mark.fast
def test_every_attribute_is_explained_with_its_default():
    rows = {name.strip("`"): default.strip("`") for name, default, _ in table("attribute")}
    public = {
        name
        for name in PositionalEncoding.__annotations__
        if not name.startswith("_") and name != "dims"
    }
    assert set(rows) == public
    for name, default in rows.items():
        if name != "name":
            assert ast.literal_eval(default) == getattr(PositionalEncoding, name)


@pytest.mark.fast
def test_every_hook_is_named_with_its_arguments():
    own = {
        name: list(inspect.signature(value).parameters)[1:]
        for name, value in vars(PositionalEncoding).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    own.pop("extended")  # its last arguments have marks
    for name, arguments in own.items():
        assert f"`{name}({', '.join(arguments)})`" in TEXT, name
    assert "`extended(policy, length, **options)`" in TEXT


@pytest.mark.fast
def test_parts_share_and_act_as_is_said():
    """Prepare and embed once a part; features once a layer; blocks in order; twice on a cache."""
    import jax
    import jax.numpy as jnp

    import posenc

    called = []

    class Notes(PositionalEncoding):
        def prepare(self, positions, streams):
            called.append(("prepare", positions.shape[1]))

        def embed(self, x, positions, streams):
            called.append("embed")
            return x

        def features(self, x, positions, segments, state):
            called.append("features")
            return None, state

        def rotate_queries(self, queries):
            called.append(("rotate_queries", queries.x.shape[1]))
            return queries.x

        def rotate_keys(self, keys):
            called.append(("rotate_keys", keys.x.shape[1]))
            return keys.x

        def logits(self, logits, scores, queries, keys, visible, carry):
            called.append("logits")
            return logits, carry

    globals()["Notes"] = Notes
    try:
        config = posenc.TransformerConfig(vocab_size=31, width=8, heads=1)
        spec = f"{__name__}:Notes"
        model = posenc.Transformer(config, spec, 8)
        tokens, positions = jnp.zeros((1, 3), jnp.int32), jnp.arange(3)[None]
        jax.eval_shape(lambda: model(tokens, positions))
        layer = ["features", ("rotate_queries", 3), ("rotate_keys", 3), "logits"]
        assert called == [("prepare", 3), "embed", *layer, *layer]
        called.clear()
        cache = model.start_cache(1, 7)
        called.clear()
        jax.eval_shape(lambda: model(tokens, positions, cache=cache))
        layer = ["features", ("rotate_queries", 3), ("rotate_keys", 7), "logits"]
        assert called == [("prepare", 3), ("prepare", 7), "embed", *layer, *layer]
    finally:
        del globals()["Notes"]
