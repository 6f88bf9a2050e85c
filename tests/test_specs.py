import collections
import json
import os
import string
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import EPS, phase_bound

from posenc.encodings import (
    REGISTRY,
    Dimensions,
    EncodingError,
    Side,
    SpecError,
    build,
    find_class,
    format_spec,
    parse_part,
    parse_spec,
)
from posenc.encodings.registry import MAX_LAYERS, MAX_NESTING, Part

pytestmark = pytest.mark.fast

DIMS = Dimensions(width=8, heads=2, head_width=4, context_length=8)
WORDS = {"true": True, "false": False, "none": None}


def built(text, layers=1, **options):
    return build(text, layers, DIMS, jax.random.key(0), **options)


def over_depth(spec, depth):
    """Spell out the layers of a model of some depth; by ``repr``, as 1 == 1.0 == True."""
    return [repr(spec[layer % len(spec)]) for layer in range(depth)]


def assert_same_layers(one, other):
    depth = len(one) * len(other)
    assert over_depth(one, depth) == over_depth(other, depth)


# Generated specs: pairs of a text and what it must be read as, compared by ``repr``.

Read = collections.namedtuple("Part", "name options")

identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
spaces = st.sampled_from(["", "", "", " ", "\t ", "\n"])
plain_names = st.one_of(st.sampled_from(sorted(REGISTRY)), identifiers)
plugin_names = st.builds("{}.{}:{}".format, identifiers, identifiers, identifiers)
characters = st.one_of(
    st.sampled_from("\"'\\,()[]=+*:#\n\t\x00\x7f é中\u2028\U0001f600"),
    st.characters(exclude_categories=["Cs"]),
)
odd_strings = st.one_of(
    st.sampled_from(["", "true", "True", "NONE", "False", "rope", "a:B", "1e5", "1", "a.b", "x"]),
    st.text(characters, max_size=8),
)


def quoted(value):
    return json.dumps(value, ensure_ascii=True)


def single_quoted(value):
    return "'" + value + "'"


strings = st.one_of(
    odd_strings.map(lambda value: (quoted(value), value)),
    odd_strings.filter(lambda value: not set("'\\") & set(value)).map(
        lambda value: (single_quoted(value), value)
    ),
    identifiers.filter(lambda v: v.lower() not in WORDS and v not in REGISTRY).map(
        lambda value: (value, value)
    ),
)
words = st.sampled_from(sorted(WORDS)).flatmap(
    lambda word: st.sampled_from([word, word.title(), word.upper()]).map(
        lambda written: (written, WORDS[word])
    )
)
numbers = st.one_of(
    st.integers(-(10**30), 10**30).map(lambda value: (str(value), value)),
    st.integers(0, 10**6).map(lambda value: (f"+{value}", value)),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda value: (repr(value), value)),
    st.sampled_from([(".5", 0.5), ("5.", 5.0), ("-1E+3", -1000.0), ("5e-324", 5e-324)]),
)


@st.composite
def lists(draw, values):
    items = draw(st.lists(values, max_size=3))
    space = draw(spaces)
    text = "[" + space + f"{space},{space}".join(item for item, _ in items) + space + "]"
    return text, tuple(value for _, value in items)


@st.composite
def options_of(draw, values, least=0):
    keys = draw(st.lists(identifiers, min_size=least, max_size=3, unique=True))
    made = [(key, *draw(values)) for key in keys]
    space = draw(spaces)
    text = f"{space},{space}".join(f"{key}{space}={space}{item}" for key, item, _ in made)
    written = f"({space}{text}{space})" if made or draw(st.booleans()) else ""
    return written, tuple(sorted(((key, value) for key, _, value in made), key=lambda o: o[0]))


@st.composite
def parts_of(draw, values, value=False):
    """Give a part; as a value, one that cannot be taken for a bare word."""
    name = draw(st.one_of(plain_names, plugin_names))
    if value and name.lower() in WORDS:
        name = "rope"
    bare = value and name not in REGISTRY and ":" not in name
    written, options = draw(options_of(values, least=1 if bare else 0))
    return name + draw(spaces if written else st.just("")) + written, Read(name, options)


values = st.recursive(
    st.one_of(strings, words, numbers),
    lambda inner: st.one_of(lists(inner), parts_of(inner, value=True)),
    max_leaves=6,
)


@st.composite
def specs(draw):
    layers, texts = [], []
    for _ in range(draw(st.integers(1, 3))):
        parts = draw(st.lists(parts_of(values), min_size=1, max_size=3))
        space = draw(spaces)
        text = f"{space}+{space}".join(part for part, _ in parts)
        count = draw(st.sampled_from([1, 1, 2, 3]))
        if count > 1 or draw(st.booleans()):
            text += f"{space}*{space}{count}"
        texts.append(text)
        layers += [tuple(part for _, part in parts)] * count
    space = draw(spaces)
    return space + f"{space},{space}".join(texts) + space, tuple(layers)


@settings(max_examples=120, deadline=None)
@given(specs())
def test_generated_specs_are_read_as_written(pair):
    text, expected = pair
    assert repr(parse_spec(text)) == repr(expected)


@settings(max_examples=120, deadline=None)
@given(specs())
def test_a_formatted_spec_reads_back_as_the_same_layers(pair):
    text, _ = pair
    spec = parse_spec(text)
    written = format_spec(spec)
    assert_same_layers(parse_spec(written), spec)
    assert format_spec(parse_spec(written)) == written


@pytest.mark.parametrize("value", ["True", "FALSE", "None", "true", "none", "rope", "a:B", "1", ""])
def test_a_formatted_string_stays_a_string(value):
    spec = parse_spec(f"nope(x={quoted(value)})")
    assert spec == ((Part("nope", (("x", value),)),),)
    assert repr(parse_spec(format_spec(spec))) == repr(spec)


pieces = ["rope", "nope", "a:B", "true", "none", "-2.5", "1e999", '"\\q"', "'a'"]
pieces += "x13()[],=+*\"'\\:.é \n\x00"
fragments = st.lists(st.sampled_from(pieces), max_size=14).map("".join)


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.text(max_size=20), st.text(string.printable, max_size=20), fragments))
def test_any_text_is_read_or_refused_as_a_spec(text):
    for read in (parse_spec, parse_part):
        try:
            result = read(text)
        except SpecError:
            continue
        spec = result if read is parse_spec else ((result,),)
        assert_same_layers(parse_spec(format_spec(spec)), spec)


@pytest.mark.parametrize(
    "text",
    ["rope(theta=" + "9" * 5000 + ")", "rope*" + "9" * 5000, "rope(theta=-" + "1" * 4400 + ")"],
    ids=["value", "count", "negative value"],
)
def test_a_number_of_thousands_of_digits_is_refused_as_a_spec(text):
    with pytest.raises(SpecError):
        parse_spec(text)


# Examples.


@pytest.mark.parametrize(
    ("text", "expected", "written"),
    [
        ("rope", [[Part("rope")]], "rope"),
        ("rope()", [[Part("rope")]], "rope"),
        (
            "rope(theta=500000)",
            [[Part("rope", (("theta", 500_000),))]],
            "rope(theta=500000)",
        ),
        ("rope*3,nope", [[Part("rope")]] * 3 + [[Part("nope")]], "rope*3,nope"),
        ("rope, rope ,rope,nope", [[Part("rope")]] * 3 + [[Part("nope")]], "rope*3,nope"),
        ("rope+alibi", [[Part("rope"), Part("alibi")]], "rope+alibi"),
        ("alibi + rope*2", [[Part("alibi"), Part("rope")]] * 2, "alibi+rope"),
        ("dape(base=alibi)", [[Part("dape", (("base", Part("alibi")),))]], "dape(base=alibi)"),
        (
            "a.b:C(x=[1, -2.5, [], word], y=m:D(z='it', w=\"q\\n\"), on=True, off=none)",
            [
                [
                    Part(
                        "a.b:C",
                        (
                            ("off", None),
                            ("on", True),
                            ("x", (1, -2.5, (), "word")),
                            ("y", Part("m:D", (("w", "q\n"), ("z", "it")))),
                        ),
                    )
                ]
            ],
            'a.b:C(off=none, on=true, x=[1, -2.5, [], word], y=m:D(w="q\\n", z=it))',
        ),
    ],
)
def test_examples(text, expected, written):
    spec = parse_spec(text)
    assert repr(spec) == repr(tuple(tuple(layer) for layer in expected))
    assert format_spec(spec) == written
    assert_same_layers(parse_spec(written), spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty spec: name an encoding .*wpe"),
        ("  \n", "empty spec"),
        ("rope,", r"expected a name at character 6 .*name\(key=value"),
        ("+rope", "character 1 "),
        ("rope(theta)", "expected '=' at character 11"),
        ("rope(theta=)", "expected a value at character 12"),
        ("rope(theta=1", "at character 13"),
        ("rope(theta=1,theta=2)", "'theta' given twice"),
        ("rope)", r"unexpected '\)' at character 5"),
        ("rope rope", "unexpected 'rope' at character 6"),
        ("rope*0", f"count from 1 to {MAX_LAYERS}"),
        ("rope*-1", "count from 1"),
        ("rope*1.5", "count from 1"),
        (f"rope*{MAX_LAYERS + 1}", f"count from 1 to {MAX_LAYERS}"),
        (f"rope*{MAX_LAYERS},nope", f"more than {MAX_LAYERS} layers"),
        ("rope(theta=1e999)", "beyond float64"),
        ('rope(x="\\q")', "string that cannot be read"),
        ('rope(x="open)', "cannot read on at character 8"),
        ("rope(x=[1 2])", "expected ',' at character 11"),
        ("a(x=" * 100 + "1" + ")" * 100, f"more than {MAX_NESTING} deep"),
        ("a(x=" + "[" * 10_000, f"more than {MAX_NESTING} deep"),
    ],
)
def test_messages_say_where_and_what(text, message):
    with pytest.raises(SpecError, match=message):
        parse_spec(text)


def test_most_layers_and_deepest_nesting():
    assert len(parse_spec(f"rope*{MAX_LAYERS}")) == MAX_LAYERS
    text = "a(x=" * MAX_NESTING + "1" + ")" * MAX_NESTING
    part, depth = parse_part(text), 0
    while isinstance(part, Part):
        part, depth = part.options[0][1], depth + 1
    assert (part, depth) == (1, MAX_NESTING)


# Names and options.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alibbi", "unknown encoding 'alibbi': did you mean alibi?"),
        ("sinusoid", "unknown encoding 'sinusoid': did you mean sinusoidal"),
        ("rpoe", "unknown encoding 'rpoe': did you mean rope"),
        ("zzz", "unknown encoding 'zzz': known: wpe, sinusoidal, rope,"),
        ("rope,Wpe", "unknown encoding 'Wpe': did you mean wpe"),
        ("rope(teta=1)", "rope has no option 'teta': did you mean theta?"),
        ("wpe(max_positions=9)", "wpe has no option 'max_positions': did you mean max_position?"),
        ("rope(zzz=1)", "rope has no option 'zzz': known: theta, pairing"),
        ("nope(theta=1)", "nope has no option 'theta': known: none"),
        ("rope(dims=1)", "rope has no option 'dims'"),
        ("rope(theta=alibbi(x=1))", "unknown encoding 'alibbi': did you mean alibi?"),
    ],
)
def test_misspelt_names_meet_the_nearest(text, message):
    with pytest.raises(SpecError) as caught:
        built(text, layers=2)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "rope(theta=ten)",
        "rope(theta=[1, 2])",
        "rope(theta=none)",
        "rope(theta=alibi)",
        "rope(pairing=neox)",
        "wpe(max_position=2.5)",
        "wpe(max_position=many)",
        "wpe(init_std=wide)",
        "sinusoidal(layout=[half])",
        "sinusoidal(scale=big)",
        "rope(partial=0.1)",
    ],
)
def test_option_values_of_the_wrong_kind_are_refused_when_built(text):
    with pytest.raises(EncodingError, match=text.split("(")[0]):
        built(text)


@pytest.mark.parametrize("text", ["pope+rope", "xpos+heads(of=[pope, nope])"])
def test_what_widens_takes_no_other_rotation_beside_it(text):
    with pytest.raises(SpecError, match="makes more channels than are projected"):
        built(text)


def test_options_reach_the_encodings_and_whole_numbers_serve():
    encodings = built("rope(theta=500000, pairing=interleaved),sinusoidal(scale=2)", layers=2)
    x = np.zeros((1, 1, 8), np.float32)
    actual = encodings.embed(jnp.asarray(x), jnp.asarray([[3]]), {})
    expected = reference.sinusoidal(x, [[3]], scale=2.0)
    assert np.abs(np.asarray(actual) - expected).max() <= 2 * (phase_bound(3) + 4 * EPS)
    x = np.arange(1, 5, dtype=np.float32).reshape(1, 1, 1, 4)
    angles = encodings.at(0).prepare(jnp.asarray([[3]]), {})
    side = Side(jnp.asarray(x), None, None, {}, None, None, prepared=angles)
    actual = np.asarray(encodings.at(0).rotate_keys(side))[0, 0, 0]
    expected = reference.rope(x[0, 0, 0], 3, 500_000.0, "interleaved")
    assert np.abs(actual - expected).max() <= 5 * phase_bound(3) + 4 * EPS * 7


# Layers.


@pytest.mark.parametrize(
    ("text", "depth", "expected"),
    [
        ("rope", 3, "rope rope rope"),
        ("rope*3,nope", 9, "rope rope rope nope rope rope rope nope rope"),
        ("rope*3,nope", 2, "rope rope"),
        ("nope,alibi*2", 6, "nope alibi alibi nope alibi alibi"),
        ("rope,sinusoidal", 4, "rope sinusoidal rope sinusoidal"),
    ],
)
def test_the_list_of_layers_repeats_over_the_depth(text, depth, expected):
    encodings = built(text, layers=depth)
    assert [encodings.at(layer).name for layer in range(depth)] == expected.split()


def test_a_sum_keeps_its_parts_in_order():
    encodings = built("rope+alibi,nope", layers=4)
    for layer in (0, 2):
        assert [part.name for part in encodings.at(layer).parts] == ["rope", "alibi"]
    assert encodings.at(3).name == "nope"


def test_one_part_has_one_table_whatever_the_layers():
    x = jnp.zeros((1, 3, 8))
    positions = jnp.asarray([[0, 7, 2]])
    for text in ("wpe", "wpe*2,rope,wpe+alibi", "rope+wpe,wpe()"):
        encodings = built(text, layers=6)
        tables = [np.asarray(part.table) for part in encodings.parts if part.name == "wpe"]
        assert len(tables) == 1
        actual = np.asarray(encodings.embed(x, positions, {}))
        np.testing.assert_array_equal(actual[0], tables[0][[0, 7, 2]])  # added once


def test_different_options_have_tables_of_their_own():
    encodings = built("wpe(max_position=16),wpe(max_position=9),wpe(max_position=16)", layers=6)
    long, short = (np.asarray(part.table) for part in encodings.parts)
    assert (len(long), len(short)) == (16, 9)
    actual = encodings.embed(jnp.zeros((1, 2, 8)), jnp.asarray([[8, 0]]), {})
    np.testing.assert_array_equal(np.asarray(actual)[0], long[[8, 0]] + short[[8, 0]])
    assert encodings.max_position == 9
    mask = encodings.representable(jnp.asarray([[8, 9, 15, 16, -1]]))
    np.testing.assert_array_equal(np.asarray(mask), [[True, False, False, False, False]])
    # Independent draws of 72 numbers: within four standard errors of no correlation.
    assert abs(np.corrcoef(long[:9].ravel(), short.ravel())[0, 1]) < 4 / np.sqrt(72)


def test_the_order_of_options_makes_no_other_part():
    encodings = built(
        "wpe(max_position=8, init_std=0.02),wpe(init_std=0.02, max_position=8)", layers=2
    )
    assert [part.table.shape for part in encodings.parts] == [(8, 8)]


def test_the_same_key_gives_the_same_table_beside_other_layers():
    tables = [np.asarray(built(text, 4).parts[0].table) for text in ("wpe", "wpe,rope", "wpe+nope")]
    for table in tables[1:]:
        np.testing.assert_array_equal(table, tables[0])


# Plug-ins.

PLUGIN = """
import jax.numpy as jnp
from flax import nnx

from posenc.encodings import NoPE, PositionalEncoding


class Constant(PositionalEncoding):
    name = "constant"

    def __init__(self, dims, rngs, *, by=1.0):
        super().__init__(dims, rngs)
        self.by = nnx.Param(jnp.asarray(by, jnp.float32))

    def logits(self, logits, scores, queries, keys, visible, carry):
        return logits + self.by[...], carry


class Own(Constant):
    name = "own"
    per_layer = True


class Twice(PositionalEncoding):
    name = "twice"

    def __init__(self, dims, rngs, *, base):
        super().__init__(dims, rngs)
        self.base = base

    def logits(self, logits, scores, queries, keys, visible, carry):
        for _ in range(2):
            logits, carry = self.base.logits(logits, scores, queries, keys, visible, carry)
        return logits, carry


class Ones(PositionalEncoding):
    name = "ones"

    def scores(self, queries, keys, visible):
        return jnp.ones((1, 1, 1, 1))


class Twos(PositionalEncoding):
    name = "twos"

    def scores(self, queries, keys, visible):
        return jnp.full((1, 1, 1, 1), 2.0)


class Weighing(PositionalEncoding):
    name = "weighing"

    def weights(self, logits, visible):
        return jnp.full_like(logits, 0.5)


class Stranger:
    pass


def function(dims, rngs):
    raise AssertionError("called")
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Give the name of a module on the path that nothing has imported yet."""
    name = "tiny_posenc_plugin"
    (tmp_path / f"{name}.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def logit_of(encoding, positions=None):
    """Give what an encoding makes of zero logits: a number, or [H, n, n] at some positions."""
    positions = jnp.asarray([[0] if positions is None else positions])
    length = positions.shape[1]
    side = Side(jnp.zeros((1, length, 2, 4)), None, positions, {}, None, None)
    zeros = jnp.zeros((1, 2, length, length))
    logits, _ = encoding.logits(zeros, zeros, side, side, jnp.ones_like(zeros, bool), None)
    logits = np.asarray(logits)
    return logits[0] if length > 1 else float(logits[0, 0, 0, 0])


def test_a_plugin_runs_where_it_is_allowed(plugin):
    encodings = built(f"{plugin}:Constant(by=2.5),alibi", layers=3, allow_plugins=True)
    assert [logit_of(encodings.at(layer)) for layer in range(3)] == [2.5, 0.0, 2.5]
    assert find_class(f"{plugin}:Constant").name == "constant"


@pytest.mark.parametrize("text", ["{}:Constant", "rope,{}:Constant", "rope(theta={}:Constant)"])
def test_a_plugin_is_not_imported_unless_allowed(plugin, text):
    text = text.format(plugin)
    assert parse_spec(text)
    with pytest.raises(SpecError, match=f"{plugin}:Constant names code outside.*--allow-plugins"):
        built(text, layers=2, allow_plugins=False)
    with pytest.raises(SpecError, match="--allow-plugins"):
        find_class(f"{plugin}:Constant", allow_plugins=False)
    assert plugin not in sys.modules


def test_parameters_are_shared_unless_the_method_has_them_per_layer(plugin):
    shared = built(f"{plugin}:Constant", layers=3)
    own = built(f"{plugin}:Own(by=5)", layers=3)
    for layer in (0, 1, 2):
        shared.at(layer).by[...] = 10.0 + layer
        own.at(layer).by[...] = 10.0 + layer
    assert [logit_of(shared.at(layer)) for layer in range(3)] == [12.0, 12.0, 12.0]
    assert [logit_of(own.at(layer)) for layer in range(3)] == [10.0, 11.0, 12.0]


def test_a_part_inside_a_part(plugin):
    positions = [0, 5, 100]
    bias = reference.alibi_bias(positions, positions, heads=2)
    encodings = built(f"{plugin}:Twice(base=alibi),{plugin}:Twice(base={plugin}:Constant(by=3))", 2)
    # Slopes of two heads are powers of two: exact.
    np.testing.assert_array_equal(logit_of(encodings.at(0), positions), 2 * bias)
    assert logit_of(encodings.at(1)) == 6.0
    nested = f"{plugin}:Twice(base={plugin}:Twice(base={plugin}:Constant(by=0.25)))"
    assert logit_of(built(nested).at(0)) == 1.0


def test_plugin_messages(plugin, tmp_path):
    (tmp_path / "tiny_posenc_broken.py").write_text("import tiny_posenc_absent\n")
    for text, message in {
        "tiny_posenc_absent:Thing": "cannot import 'tiny_posenc_absent' of plug-in .*PYTHONPATH",
        f"{plugin}.sub:Thing": "cannot import .*PYTHONPATH",
        "tiny_posenc_broken:Thing": "cannot import 'tiny_posenc_broken'.*tiny_posenc_absent",
        f"{plugin}:Absent": f"plug-in {plugin}:Absent is no subclass of .*PositionalEncoding",
        f"{plugin}:Stranger": "is no subclass of .*PositionalEncoding",
        f"{plugin}:function": "is no subclass of .*PositionalEncoding",
        f"{plugin}:jnp": "is no subclass of .*PositionalEncoding",
        f"{plugin}:Constant(bye=1)": "has no option 'bye': did you mean by?",
        f"{plugin}:Twice": "base",  # a required option is named
    }.items():
        with pytest.raises(SpecError, match=message):
            built(text)


@pytest.mark.parametrize(
    "text",
    [
        "rope(theta=__import__('os').abort())",
        "rope(theta=open)",
        "rope(theta='1 + 1')",
        "rope(theta=2**10)",
        "rope(theta=1+1)",
        "rope(theta=os.abort)",
        "rope(theta=(1))",
        "rope(theta={1})",
        "rope(theta=lambda: 1)",
        "os:abort",
        "os:abort()",
        "__import__('os')",
    ],
)
def test_specs_are_never_evaluated(text, monkeypatch):
    def abort():
        raise AssertionError("evaluated")

    monkeypatch.setattr(os, "abort", abort)
    with pytest.raises(SpecError):
        built(text)


def test_words_of_a_spec_are_data():
    [[part]] = parse_spec("rope(a=os.abort, b='__import__(\"os\")', c=[eval, '1 + 1'])")
    expected = (("a", "os.abort"), ("b", '__import__("os")'), ("c", ("eval", "1 + 1")))
    assert part == Part("rope", expected)


def test_two_parts_that_replace_scores_are_refused_in_one_layer(plugin):
    ones, twos, weighing = (f"{plugin}:{name}" for name in ("Ones", "Twos", "Weighing"))
    with pytest.raises(SpecError, match=r"ones and twos cannot be added in one layer.*scores"):
        built(f"nope,{ones}+rope+{twos}", layers=2)
    for twice in (f"{ones}+{ones}", f"{weighing}+alibi+{weighing}", "wpe+wpe", "fox+rope+fox"):
        with pytest.raises(SpecError, match=r"twice in one layer: write it once"):
            built(twice)
    # In two layers, or replacing different hooks, they are welcome.
    encodings = built(f"{ones},{twos}+{weighing}", layers=2)
    side = Side(jnp.zeros((1, 1, 2, 4)), None, jnp.asarray([[0]]), {}, None, None)
    both = encodings.at(1)
    pair = Side(side.x, None, side.positions, {}, None, None, (None, None), (None, None))
    visible = jnp.ones((1, 1, 1, 1), bool)
    assert encodings.at(0).scores(side, side, visible).item() == 1.0
    assert both.scores(pair, pair, visible).item() == 2.0
    assert both.weights(jnp.zeros((1, 1, 1, 1)), visible).item() == 0.5
