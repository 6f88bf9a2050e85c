"""The audit, against models made whole, loops over pairs, and gradients of copies."""

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import posenc
import train
from eval.__main__ import main
from eval.audit import (
    audit_model,
    audit_trained,
    blocks_hash,
    check_lengths,
    growth,
    lengthened,
    moved,
    parameter_shapes,
    visible_pairs,
)
from eval.audit_report import draw_gradients, model_words
from eval.gradients import position_gradients
from posenc.attention import visibility
from posenc.encodings import REGISTRY, PositionalEncoding, Side
from posenc.encodings.registry import examples
from posenc.errors import UserError
from posenc.training import mean_nll, split
from posenc.transformer import PRESETS, Transformer, TransformerConfig, preset

EPS = 2.0**-24
SMALL = TransformerConfig(vocab_size=29, layers=3, width=24, heads=2, init_std=0.3)


class LayerTables(PositionalEncoding):
    """A bias of each layer's own for each distance within the context: an encoding for tests."""

    name = "layer-tables"
    per_layer = True

    def __init__(self, dims, rngs):
        super().__init__(dims, rngs)
        self.bias = nnx.Param(jnp.zeros((dims.context_length, dims.heads)))
        self.scale = nnx.Param(jnp.ones(dims.heads))


class Gates(PositionalEncoding):
    """Two numbers a token from a matrix of its own, and a carry: an encoding for tests."""

    name = "gates"

    def __init__(self, dims, rngs):
        super().__init__(dims, rngs)
        self.gate = nnx.Param(jnp.zeros((dims.width, 2)))

    def features(self, x, positions, segments, state):
        return x @ self.gate[...], state

    def start_carry(self, batch, slots):
        return jnp.zeros((batch, slots)) + self.gate[0, 0]


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.setitem(sys.modules, "audited", type(sys)("audited"))
    sys.modules["audited"].LayerTables = LayerTables
    sys.modules["audited"].Gates = Gates
    return "audited:LayerTables"


# The account.


@pytest.mark.fast
def test_of_gpt2_small_the_position_table_alone_knows_the_context_length():
    found = audit_model(preset("gpt2-small"), "wpe", (1024, 4096))
    table = "encoding.parts.0.table"
    assert found["changing"] == [{"name": table, "shapes": [[1024, 768], [4096, 768]]}]
    assert found["containing"] == [
        [{"name": table, "shape": [1024, 768]}],
        [{"name": table, "shape": [4096, 768]}],
    ]
    assert found["parameters"][0] == {
        "one block": 7_087_872,
        "all blocks": 85_054_464,
        "token embedding": 38_597_376,
        "final norm": 1_536,
        "encoding": 786_432,
        "total": 124_439_808,
    }
    more = {k: found["parameters"][1][k] - v for k, v in found["parameters"][0].items()}
    assert more == dict.fromkeys(more, 0) | {"encoding": 2_359_296, "total": 2_359_296}
    assert found["block_bytes"] == [4 * 7_087_872] * 2
    assert found["without_sharing"] == [85_054_464 * 1024, 85_054_464 * 4096]
    assert found["growth"][0]["kv_cache_bytes"] == 12 * 2 * 1024 * 768 * 4
    words = model_words("gpt2-small", found)
    for number in ("87.1 billion", "+2,359,296", "124,439,808", "75,497,472"):
        assert number in words


@pytest.mark.fast
def test_a_number_in_a_shape_is_not_what_is_looked_for():
    """In gpt2-medium the width is 1024 as well: only one of 19 kinds of such shapes is."""
    found = audit_model(preset("gpt2-medium"), "wpe", (1024, 2048))
    assert [item["name"] for item in found["changing"]] == ["encoding.parts.0.table"]
    kinds = {re.sub(r"\.\d+\.", ".*.", item["name"]) for item in found["containing"][0]}
    assert len(kinds) == 19
    assert "and 15 more kinds, listed by --json" in model_words("gpt2-medium", found)


@pytest.mark.parametrize(
    ("changes", "encoding"),
    [
        *(({}, spec) for spec in examples().values()),
        ({"tied_head": False, "kv_heads": 1, "qk_norm": True}, "rope*2,wpe"),
        ({"norm": "layer", "bias": True, "activation": "gelu"}, "wpe+alibi,wpe(max_position=9)"),
        ({"sharing": "none"}, "rope"),
        ({"sharing": "groups(copies=4)"}, "audited:LayerTables"),
        ({}, "audited:LayerTables,nope"),
        ({}, "rope+audited:Gates"),
    ],
)
def test_one_block_stands_for_all_of_a_model_made_whole(changes, encoding, plugin):
    config = dataclasses.replace(SMALL, **changes)
    shapes = parameter_shapes(config, encoding, 16, allow_plugins=True)
    whole = split(nnx.eval_shape(lambda: Transformer(config, encoding, 16)))[1]
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in shapes.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in whole.items()
    }


@pytest.mark.fast
def test_what_changes_with_the_length_is_found_in_every_layer(plugin):
    found = audit_model(SMALL, f"{plugin},nope", (8, 16, 24), allow_plugins=True)
    assert found["changing"] == [
        {"name": f"encoding.parts.{part}.bias", "shapes": [[8, 2], [16, 2], [24, 2]]}
        for part in (0, 2)
    ]
    unshared = dataclasses.replace(SMALL, sharing="none")
    names = [item["name"] for item in audit_model(unshared, "rope", (8, 16))["changing"]]
    assert names == [n for n in parameter_shapes(unshared, "rope", 8) if n.startswith("blocks.")]
    assert len(names) == 3 * 9
    grouped = dataclasses.replace(SMALL, sharing="groups(copies=4)")
    found = audit_model(grouped, "rope", (8, 16))
    assert (found["changing"], found["copies"]) == ([], [4, 4])
    assert "runs of positions: 4 copies of 2 at 8, 4 copies of 4 at 16" in model_words("x", found)


# What grows.


@pytest.mark.fast
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.one_of(st.none(), st.integers(0, 45)), st.integers(0, 5))
def test_visible_pairs_are_those_of_attention(length, reach, sinks):
    slots = jnp.arange(length)[None]
    side = Side(None, None, slots, {}, slots, jnp.ones((1, length), jnp.int32))
    seen = visibility(side, side, causal=True, reach=reach, sinks=sinks, ranks=slots)
    assert visible_pairs(length, reach, sinks if reach is not None else 0) == int(seen.sum())


@pytest.mark.fast
def test_cache_bytes_are_those_of_a_real_cache():
    config = dataclasses.replace(SMALL, kv_heads=1, dtype="bfloat16")
    cache = Transformer(config, "rope", 16).start_cache(3, 16)
    found = growth(config, "rope", 16, 3, allow_plugins=False)
    kept = sum(leaf.nbytes for layer in cache.layers for leaf in (layer.keys, layer.values))
    assert found["kv_cache_bytes"] == kept == 3 * 2 * 3 * 16 * 12 * 2
    assert kept + found["other_cache_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


@pytest.mark.fast
def test_what_an_encoding_keeps_of_a_token_is_counted(plugin):
    """Features and carries may come from parameters, which an abstract model does not have."""
    spec = "rope*2,rope+audited:Gates"
    cache = Transformer(SMALL, spec, 16).start_cache(3, 16)
    found = growth(SMALL, spec, 16, 3, allow_plugins=True)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert found["kv_cache_bytes"] + found["other_cache_bytes"] == whole
    plain = growth(SMALL, "rope", 16, 3, allow_plugins=True)
    more = found["other_cache_bytes"] - plain["other_cache_bytes"]
    assert more == 3 * 16 * 2 * 4 + 3 * 16 * 4


@pytest.mark.fast
def test_attention_flops_are_a_multiply_and_an_add_a_pair_and_channel(plugin):
    layers, batch, length, heads, channels = 3, 2, 10, 2, 12
    total = 0
    for query in range(length):
        for _ in range(query + 1):
            total += layers * batch * heads * channels * 2 * 2  # score, and weighted sum
    found = growth(SMALL, f"{plugin},nope", length, batch, allow_plugins=True)
    assert found["attention_flops"] == total


# Trained blocks in a longer context.


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("audited")
    for n in range(120):
        words = np.random.default_rng(n).integers(0, 200, 80)
        (out / f"{n}.txt").write_text(" ".join(f"word{word}" for word in words))
    return train.main(
        train.Arguments(
            encoding=("wpe", "rope"),
            model="nano",
            data=str(out / "*.txt"),
            train_length=16,
            steps=4,
            batch_size=4,
            eval_tokens=64,
            out=out / "runs",
        )
    )


def audit_of(capsys, *words):
    capsys.readouterr()
    main(["audit", *map(str, words)])
    return capsys.readouterr()


@pytest.mark.xdist_group("audited runs")
def test_trained_blocks_go_to_a_longer_context_and_what_wpe_lacks_is_measured(runs, capsys):
    store = runs[0].parent / "report"
    words = ["--run", *runs, "--lengths", 16, 32, "--report", store]
    said = audit_of(capsys, *words).out
    assert said.count("the same bytes") == 2
    assert said.count("through the blocks alone: 0\n") == 2
    assert "with the encoding: position 5000 has no representation in wpe" in said
    assert re.search(r"wpe, extend=interpolate +│ +\d\.\d{3} │ +\d\.\d{3}", said)

    found = json.loads(audit_of(capsys, *words, "--json").out)
    for folder, item in zip(runs, found["audits"], strict=True):
        trained = item["trained"]
        stored = split(posenc.load(folder))[1]
        # The hash, from its definition.
        digest = hashlib.sha256()
        for name in sorted(n for n in stored if n.startswith("blocks.")):
            value = np.asarray(stored[name])
            digest.update(f"{name} {value.shape} float32\0".encode() + value.tobytes())
        assert trained["blocks_sha256"] == trained["longer_blocks_sha256"] == digest.hexdigest()
        assert trained["blocks_alone"] == 0
    wpe, rope = (item["trained"] for item in found["audits"])
    assert (wpe["with_encoding"], rope["error"]) == (None, None)
    # Float32 phases at 5015, in a state of size 1: far from 0 only if position leaked in.
    assert 0 < rope["with_encoding"] < 4 * 5015 * EPS
    at = {
        (row["encoding"], row["length"], row["extend"]): row["nll"]
        for row in found["losses"]
        if row["protocol"] == "nll_by_context"
    }
    assert at["wpe", 32, None] is None
    measured = ["clamp", "interpolate", "wrap", "fresh"]
    assert all(4 < at["wpe", 32, way] < 7 for way in measured)
    assert 4 < at["rope", 32, None] < 7

    # The same losses as eval score gives.
    again = store / "again"
    ways = ("--extend", *measured, "--report", str(again))
    main(["score", *map(str, runs), "--lengths", "16", "32", *ways])
    scored = [json.loads(line) for line in (again / "rows.jsonl").open()]
    assert {
        (row["encoding"], row["length"], row["extend"]): row["nll"]
        for row in scored
        if row["protocol"] == "nll_by_context"
    } == at


@pytest.mark.fast
def test_a_changed_byte_changes_the_hash_and_other_weights_do_not():
    _, parameters = split(Transformer(SMALL, "wpe", 8))
    before = blocks_hash(parameters)
    assert blocks_hash(parameters | {"embedding.embedding": jnp.zeros((29, 24))}) == before
    name = "blocks.1.mlp.up.kernel"
    nudged = np.asarray(parameters[name]).copy()
    nudged.view(np.uint32)[3, 3] ^= 1
    assert blocks_hash(parameters | {name: nudged}) != before


def test_only_the_encoding_tells_near_from_far():
    tokens = np.arange(12) % 29
    changes = {
        name: audit_trained(Transformer(SMALL, name, 16), name, tokens, 40, 700)
        for name in ("sinusoidal", "alibi", "nope")
    }
    assert all(found["blocks_alone"] == 0 for found in changes.values())
    assert changes["alibi"]["with_encoding"] == changes["nope"]["with_encoding"] == 0
    assert changes["sinusoidal"]["with_encoding"] > 0.1


@pytest.mark.fast
def test_blocks_that_belong_to_positions_are_not_taken_further():
    for sharing in ("none", "groups(copies=4)"):
        model = Transformer(dataclasses.replace(SMALL, sharing=sharing), "rope", 8)
        with pytest.raises(UserError, match="weights of the positions 0 to 7, and others have no"):
            lengthened(model, "rope", 16)
    found = audit_trained(model, "rope", np.arange(8), 16, 100)
    assert (found["longer_blocks_sha256"], found["blocks_alone"]) == (None, None)
    assert "position 100 has no weights" in found["error"]
    with pytest.raises(posenc.PositionOutOfRange):
        moved(model, np.arange(8), 1)


@pytest.mark.fast
def test_blocks_of_another_shape_do_not_fit():
    model = Transformer(SMALL, "rope", 8)
    _, before = split(model)
    _, after = split(lengthened(model, "rope", 16))
    assert blocks_hash(after) == blocks_hash(before)
    assert after.keys() == before.keys()  # rope has no parameter
    kernel = model.blocks[1].mlp.up.kernel
    model.blocks[1].mlp.up.kernel = nnx.Param(kernel[:, :3])
    with pytest.raises(UserError) as refusal:
        lengthened(model, "rope", 16)
    assert str(refusal.value) == (
        "blocks.1.mlp.up.kernel is [24, 3] of float32 as trained, and [24, 64] of float32 at 16 "
        "tokens"
    )


def test_gpt2_from_a_file_is_audited(tmp_path, capsys):
    config = dataclasses.replace(preset("gpt2-small"), vocab_size=31, layers=2, width=12, heads=3)
    posenc.save_gpt2(Transformer(config, "wpe", 16), tmp_path / "gpt2")
    said = audit_of(capsys, "--pretrained", tmp_path / "gpt2", "--position", 16).out
    assert "encoding.parts.0.table  [16, 12] -> [64, 12]" in said
    assert "the same bytes" in said
    assert "through the blocks alone: 0\n" in said
    assert "position 16 has no representation in wpe, which knows positions 0 to 15" in said


# Gradients.


@pytest.mark.parametrize("changes", [{}, {"bias": True, "qk_norm": True, "activation": "gelu"}])
def test_what_positions_add_to_a_gradient_is_what_copies_of_their_own_would_get(changes):
    length = 10
    config = dataclasses.replace(SMALL, layers=2, kv_heads=1, **changes)
    model = Transformer(config, "rope", length)
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (2, length + 1), 0, 29))
    found = position_gradients(model, tokens)

    def gradient(sharing):
        apart = Transformer(dataclasses.replace(config, sharing=sharing), "rope", length)
        merge, parameters = split(apart)

        @jax.jit
        def of(row):
            batch = {
                "inputs": row[None, :-1],
                "targets": row[None, 1:],
                "positions": jnp.arange(length)[None],
                "segments": jnp.ones((1, length), jnp.int32),
                "mask": jnp.ones((1, length), bool),
            }
            return jax.grad(lambda p: mean_nll(merge(p), batch))(parameters)

        return [of(row) for row in tokens]

    copies, whole = gradient("none"), gradient("all")
    names = [n.removesuffix(".kernel") for n in whole[0] if re.match(r"blocks.*kernel$", n)]
    assert sorted(found) == sorted(names)
    for name, own in found.items():
        parts = [np.asarray(g[f"{name}.kernel"], np.float64).reshape(length, -1) for g in copies]
        norms = [np.linalg.norm(part, axis=1) for part in parts]
        # Gradients of float32, products of sums of a few dozen terms.
        bound = 1024 * EPS
        largest = np.max(norms)
        np.testing.assert_allclose(own["norm"], np.mean(norms, 0), rtol=bound, atol=EPS * largest)
        for first, second in ((1, 2), (3, 8), (9, 4)):
            cosine = np.mean(
                [
                    p[first] @ p[second] / n[first] / n[second]
                    for p, n in zip(parts, norms, strict=True)
                ]
            )
            assert own["cosine"][first, second] == pytest.approx(cosine, abs=bound)
        total = [np.asarray(g[f"{name}.kernel"], np.float64) for g in whole]
        gain = np.mean([np.sum(t**2) / np.sum(n**2) for t, n in zip(total, norms, strict=True)])
        assert own["gain"] == pytest.approx(gain, rel=4 * bound)
        share = np.mean(
            [p @ t.ravel() / np.sum(t**2) for p, t in zip(parts, total, strict=True)], axis=0
        )
        np.testing.assert_allclose(own["share"], share, atol=16 * bound)
        assert own["share"].sum() == pytest.approx(1, abs=1e-9)
        # A softmax over one key has no gradient: the first query teaches nothing.
        assert own["contributions"] == length - name.endswith("query")


@pytest.mark.xdist_group("audited runs")
def test_gradients_of_a_run_are_said_and_drawn(runs, capsys, tmp_path):
    words = ["--run", runs[1], "--gradients", "--sequences", 2, "--report", tmp_path]
    said = audit_of(capsys, *words).out
    assert re.search(r"blocks\.1\.mlp\.down +\d\.\d\d .* 16 of 16", said)
    assert re.search(r"blocks\.0\.attention\.query .* 15 of 16", said)
    figure = tmp_path / f"gradients-{runs[1].name}.png"
    kept = json.loads(figure.with_suffix(".json").read_text())
    assert figure.read_bytes().startswith(b"\x89PNG")
    found = json.loads(audit_of(capsys, *words, "--json").out)["audits"][0]
    assert found["sequences"] == 2
    own = found["gradients"]["blocks.0.attention.out"]
    assert np.shape(own["cosine"]) == (16, 16)
    assert sum(own["share"]) == pytest.approx(1)
    for item in (found, kept):
        assert item["certificate"]["config_hash"] == posenc.runs.open_run(runs[1]).hash
        assert item["certificate"]["checkpoint_step"] == 4
        assert item["certificate"]["data"] == posenc.runs.open_run(runs[1]).data
    cosines = [item["cosine"] for item in found["gradients"].values()]
    np.testing.assert_allclose(kept["gradients"]["cosine"], np.mean(cosines, axis=0), atol=1e-4)
    # The kept numbers, the same figure.
    draw_gradients(kept["gradients"], tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == figure.read_bytes()


# The command.


@pytest.mark.fast
def test_every_encoding_of_the_registry_is_in_the_table(capsys):
    said = audit_of(capsys, "--model", "gpt2-small").out
    table = said.splitlines()[2:]
    assert table[1].split()[1:3] == ["786,432", "3,145,728"]
    for spec, line in zip(examples().values(), table[1:], strict=True):
        found = audit_model(preset("gpt2-small"), spec, (1024, 4096))["parameters"]
        numbers = [found[0]["encoding"], found[1]["encoding"], 85_054_464, found[0]["total"]]
        assert line.startswith(f"{spec} ")
        words = line.removeprefix(spec).split()
        assert [f"{n:,}" for n in numbers] == [w for w in words if w[0].isdigit()]


@pytest.mark.fast
def test_an_encoding_that_does_not_suit_a_preset_is_named_below_the_table(capsys, monkeypatch):
    class Refusing(PositionalEncoding):
        def __init__(self, dims, rngs, *, size: int):
            super().__init__(dims, rngs)

    monkeypatch.setitem(REGISTRY, "refusing", Refusing)
    said = audit_of(capsys, "--model", "nano", "--sharing", "none", "--lengths", 96, 400).out
    assert said.endswith("refusing: refusing lacks an option: refusing(size=...)\n")
    # In the order of the lengths, whatever their digits.
    assert "2,420,736 and 10,086,400" in said


@pytest.mark.fast
def test_the_account_of_every_preset_is_json(capsys):
    for name in PRESETS:
        words = ["--model", name, "--encoding", "wpe", "--dtype", "bfloat16", "--json"]
        (found,) = json.loads(audit_of(capsys, *words).out)["audits"]
        small, large = found["model"]["parameters"]
        assert large["total"] - small["total"] == 3072 * preset(name).width
        assert found["model"]["growth"][0]["kv_cache_bytes"] == (
            2 * 2 * 1024 * preset(name).layers * preset(name).width
        )


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "takes one of --model PRESET, --run RUN ... and --pretrained FOLDER, and was given 0"),
        ("--model tiny --run x", "was given 2"),
        ("--model gpt2-smal", "did you mean gpt2-small"),
        ("--model tiny --encoding rop", "did you mean rope"),
        ("--model tiny --lengths 64", "--lengths 64: give two or more lengths"),
        ("--model tiny --lengths 0 64", "--lengths 0 64: give two or more lengths, at least 1"),
        ("--model tiny --batch 0", "--batch is 0"),
        ("--model tiny --sharing groups(copies=3)", "among 3 copies evenly: take 1, 2, 4"),
        ("--model tiny --gradients", "give --run RUN"),
        ("--run nowhere", "nowhere is no run"),
        (
            "--run nowhere --encoding rope",
            "rope would do nothing here: a trained model has its own",
        ),
        ("--run nowhere --position -1", "--position is -1"),
        ("--run nowhere --gradients --sequences 0", "--sequences is 0"),
        ("--model tiny --sequences 5", "--sequences 5 would do nothing here: it is the number"),
        ("--model tiny --position 5", "--position 5 would do nothing here: it is where"),
        ("--run nowhere --gradients --lengths 4 5", "--lengths 4 5 would do nothing"),
        ("--run nowhere --gradients --batch 2", "--batch 2 would do nothing"),
        ("--run nowhere nowhere2 --sharing all", "--sharing all would do nothing"),
        ("--pretrained ./nowhere", "there is no folder ./nowhere"),
        ("--model tiny --encoding some_module:Class", "--allow-plugins"),
        ("--model tiny --lenghts 64 128", "did you mean --lengths"),
    ],
)
def test_what_cannot_be_audited_is_refused_in_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        audit_of(capsys, *words.split())
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_misspelt_option_is_one_line_whatever_the_output_can_draw(encoding):
    done = subprocess.run(
        [sys.executable, "-m", "eval", "audit", "--model", "tiny", "--lenghts", "64"],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("posenc: Unrecognized options: --lenghts, 64; did you mean --len")
    assert done.stderr.count("\n") == 1


@pytest.mark.xdist_group("audited runs")
def test_where_there_is_too_little_text_for_losses_all_else_is_said(runs, capsys, tmp_path):
    words = ["--run", runs[1], "--lengths", 16, 100_000, "--report", tmp_path]
    said = audit_of(capsys, *words).out
    assert "the same bytes" in said
    assert re.search("losses were not measured: no test document .* is long enough", said)
    twice = [runs[1], runs[1].parent / ".." / "runs" / runs[1].name]
    with pytest.raises(SystemExit):
        audit_of(capsys, "--run", *twice, "--gradients", "--report", tmp_path)
    assert f"two runs are called {runs[1].name}" in capsys.readouterr().err


@pytest.mark.fast
def test_lengths_are_two_at_least():
    assert check_lengths((64, 16, 64)) == (16, 64)
    with pytest.raises(UserError, match="give two or more"):
        check_lengths((64, 64))
