"""What can be listed, shown and cited, and that the documents say so."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from posenc.__main__ import main
from posenc.catalogue import catalogue, markdown
from posenc.citations import MalformedEntry, entries_of, fields_of, plain, short
from posenc.effects import effects
from posenc.encodings.extension import POLICIES
from posenc.encodings.registry import REGISTRY
from posenc.encodings.sampling import SAMPLERS
from posenc.encodings.scaling import SCALINGS
from posenc.transformer import PRESETS
from studies.documents import with_list

ROOT = Path(__file__).resolve().parent.parent
ROWS = catalogue()


def said(capsys, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["posenc", *map(str, words)])
    main()
    return capsys.readouterr().out


@pytest.mark.fast
def test_everything_registered_is_listed():
    for kind, known in (
        ("encodings", REGISTRY),
        ("scalings", SCALINGS),
        ("samplers", SAMPLERS),
        ("policies", POLICIES),
    ):
        assert [row["name"] for row in ROWS[kind]] == list(known)


@pytest.mark.fast
def test_the_documents_have_the_list_of_now():
    text = (ROOT / "docs/encodings.md").read_text()
    assert with_list(text) == text, "run: python -m studies.documents docs/encodings.md"
    assert markdown(ROWS) in text


@pytest.mark.fast
def test_rows_say_what_is_known_of_encodings():
    """Extra parameters at GPT-2 small's size are those of the accounts in papers and code."""
    rows = {row["name"]: row for row in ROWS["encodings"]}
    extra = {name: row["parameters"] for name, row in rows.items()}
    assert extra["wpe"] == 786_432
    assert extra["t5"] == 384
    assert extra["kerple_log"] == extra["kerple_power"] == 24
    assert extra["fire"] == 12 * 462
    assert extra["dape"] == 12 * 1_196
    assert extra["cope"] == 12 * 4_096
    assert extra["fox"] == extra["cable"] == 12 * 9_228
    assert extra["pope"] == 12 * 768
    assert extra["transformer_xl"] == 12 * 591_360
    assert extra["shaw"] == 12 * 2_112
    assert extra["path"] == 12 * 60_684
    for name in ("sinusoidal", "rope", "p_rope", "xpos", "alibi", "nope", "sandwich", "selective"):
        assert extra[name] == 0
        assert not rows[name]["learned"]
    assert rows["wpe"]["max_position"] == 1024
    assert rows["rope"]["acts_on"] == ["queries, keys"]
    assert rows["alibi"]["acts_on"] == ["logits"]
    assert rows["wpe"]["acts_on"] == ["embedding"]
    assert rows["stick_breaking"]["acts_on"] == ["softmax"]
    assert rows["window"]["acts_on"] == ["visibility"]
    assert not rows["alibi"]["bidirectional"]


@pytest.mark.fast
def test_list_prints_all_and_json_says_the_same(capsys, monkeypatch):
    text = said(capsys, monkeypatch, "list")
    for kind in ROWS.values():
        for row in kind:
            assert re.search(rf"^  {re.escape(row['name'])} ", text, re.MULTILINE)
    read = json.loads(said(capsys, monkeypatch, "list", "--json"))
    assert [row["name"] for row in read["encodings"]] == list(REGISTRY)
    assert read["encodings"][0]["parameters"] == 786_432
    assert read["models"] == list(PRESETS)
    assert said(capsys, monkeypatch, "list", "--markdown").strip() == markdown(ROWS)


# Citations.

REFERENCES = {
    f"{kind}: {row['name']}": row["reference"] for kind, rows in ROWS.items() for row in rows
}
WITHOUT = {
    "encodings: heads",
    "samplers: sequential",
    *(f"policies: {name}" for name in ("clamp", "interpolate", "wrap", "fresh")),
}


@pytest.mark.fast
def test_every_paper_is_named_but_where_there_is_none():
    assert {name for name, reference in REFERENCES.items() if not reference} == WITHOUT


@pytest.mark.fast
@pytest.mark.parametrize("name", sorted(set(REFERENCES) - WITHOUT))
def test_every_reference_is_complete_bibtex(name):
    import bibtexparser

    database = bibtexparser.loads(REFERENCES[name])
    own = [fields_of(entry) for entry in entries_of(REFERENCES[name])]
    assert len(database.entries) == len(own)
    for entry, fields in zip(database.entries, own, strict=True):
        assert entry.pop("ENTRYTYPE") == fields.pop("type").lower()
        assert entry.pop("ID") == fields.pop("key")
        assert {key: " ".join(text.split()) for key, text in entry.items()} == fields
        assert {"author", "title", "year"} <= set(fields)
        assert re.fullmatch(r"20[0-2]\d|19\d\d", fields["year"])
        where = {"journal", "booktitle", "institution", "howpublished"} & set(fields)
        assert len(where) == 1
        # A backslash that Python took for its own leaves an accent without one.
        assert not re.search(r"\{['\"`^~]", " ".join(fields.values()))
        for person in re.split(r"\s+and\s+", fields["author"]):
            assert person == "others" or person.startswith("{") or ", " in person


@pytest.mark.fast
def test_one_paper_has_one_entry_wherever_it_is_named():
    entries = {}
    for reference in REFERENCES.values():
        for entry in entries_of(reference):
            key = fields_of(entry)["key"]
            assert entries.setdefault(key, entry) == entry


@pytest.mark.fast
@pytest.mark.parametrize(
    "entry", ["", "text", "@misc{key}", "@misc{key,\n  title={open\n}", "@misc{k,\n  title=none\n}"]
)
def test_what_is_no_entry_is_refused(entry):
    with pytest.raises(MalformedEntry):
        fields_of(entry)


@pytest.mark.fast
def test_papers_are_named_in_short():
    assert short(REFERENCES["encodings: rope"]) == "Su et al., 2021"
    assert short(REFERENCES["encodings: logn"]) == "Chiang and Cholak, 2022"
    assert plain(r"Veli{\v{c}}kovi{\'c} and {OpenAI}") == "Veličković and OpenAI"


@pytest.mark.fast
def test_cite_prints_every_paper_of_some_specs_once(capsys, monkeypatch):
    specs = ("rope(scaling=yarn(factor=4))+fox,nope", "heads(of=[rope, alibi])", "dape(base=t5)")
    keys = re.findall(r"^@\w+\{(\w+),", said(capsys, monkeypatch, "cite", *specs), re.MULTILINE)
    assert len(keys) == len(set(keys))
    assert [key[:4] for key in keys] == [
        "su20",
        "peng",
        "lin2",
        "kaze",
        "pres",
        "zhen",
        "zhen",
        "raff",
    ]
    policies = said(capsys, monkeypatch, "cite", "rerope", "randomized", "drop")
    assert re.findall(r"^@\w+\{(\w+),", policies, re.MULTILINE) == [
        "su2023rerope",
        "ruoss2023randomized",
        "gelberg2025extending",
    ]


# Figures.


def test_show_draws_a_figure_and_says_where(capsys, monkeypatch, tmp_path):
    path = tmp_path / "new" / "figure.png"
    text = said(
        capsys,
        monkeypatch,
        "show",
        "wpe+rope+t5",
        "--model",
        "tiny",
        "--length",
        64,
        "--figure",
        path,
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"figure: {path}" in text
    assert "encoding.parts.0.table [64, 64]" in text
    nothing = said(capsys, monkeypatch, "show", "nope", "--model", "nano", "--length", 8)
    assert "nothing to draw" in nothing


@pytest.mark.fast
def test_panels_hold_the_numbers_of_the_encoding():
    shape = PRESETS["tiny"]
    (bias,) = [p for p in effects("alibi", shape, 32) if p["kind"] == "bias"]
    slopes = 2.0 ** (-8 * np.arange(1, 5) / 4)
    np.testing.assert_allclose(bias["values"], -slopes[:, None] * np.arange(64), rtol=1e-5)
    kinds = {p["kind"]: p["values"] for p in effects("rope", shape, 32)}
    np.testing.assert_allclose(
        kinds["spectrum"], 2 * np.pi * 10_000 ** (np.arange(8) / 8), rtol=1e-6
    )
    assert set(kinds) == {"spectrum", "score"}
    np.testing.assert_allclose(kinds["score"][:, 0], 1.0, atol=1e-6)
    (same,) = [p["values"] for p in effects("sinusoidal", shape, 16)]
    angles = (np.arange(16)[:, None] - np.arange(16)[None])[..., None] * 10_000.0 ** (
        -np.arange(32) / 32
    )
    np.testing.assert_allclose(same, np.cos(angles).mean(axis=-1), atol=1e-5)
    # What rows hand on to each other: all rows between a key and the last one mask it.
    (masking,) = [p["values"] for p in effects("selective", shape, 150) if p["kind"] == "bias"]
    assert masking.shape == (4, 300)
    assert (masking[:, :2] == 0).all()
    assert masking.min() < -10
    (rows,) = [p["values"] for p in effects("coupled(max_position=20)", shape, 64)]
    assert rows.shape == (19, 19)
    spectrum = [p["values"] for p in effects("p_rope(p=0.5)", shape, 16) if p["kind"] == "spectrum"]
    assert np.isinf(spectrum[0]).tolist() == [False] * 4 + [True] * 4
