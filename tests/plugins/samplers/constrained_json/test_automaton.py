"""The automaton takes what JSON is, byte by byte, and nothing else; and it knows how far the end is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.plugins.samplers.constrained_json.automaton import END, JsonState, complete, cost, start, step

DEPTH = 8

# Every kind of sign: plain, escaped, of one to four bytes, and the first and last of UTF-8's ranges.
texts = st.text(
    st.sampled_from('aZ09 {}[]:,"\\/\b\f\n\r\t\0\x1f\x7f\x80é\u07ff\u0800€日\ud7ff\ue000\uffff😀\U0010ffff'), max_size=8
)
floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | floats | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)
forms = st.sampled_from(
    [
        *({"indent": indent} for indent in (None, 0, 2, 4, "\t")),
        *({"separators": pair} for pair in ((",", ":"), (" , ", " : "))),
        *({"ensure_ascii": False, "indent": indent} for indent in (None, 1)),
    ]
)


def read(text: bytes, root: str = "any", depth: int = DEPTH, state: JsonState | None = None) -> JsonState | None:
    state = state or start(root)
    for byte in text:
        state = step(state, byte, depth)
        if state is None:
            return None
    return state


def deep(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(deep, value.values()), default=0)
    return 1 + max(map(deep, value), default=0) if isinstance(value, list) else 0


def is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(values, forms)
def test_what_json_dumps_writes_is_taken(value, form):
    """However deep the data is; and with less depth than it has, it is not."""
    text = json.dumps(value, **form).encode()
    found = read(text, depth=max(deep(value), 1))
    assert found is not None
    assert complete(found)
    if deep(value) > 1:
        assert read(text, depth=deep(value) - 1) is None


@settings(max_examples=100, deadline=None)
@given(values, st.data())
def test_it_does_not_matter_where_a_text_is_cut(value, data):
    """A state is all that there is to know of what came before: tokens may split signs and escapes."""
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans())).encode()
    cut = data.draw(st.integers(0, len(text)))
    first = read(text[:cut], depth=32)
    assert first is not None
    assert read(text[cut:], depth=32, state=first) == read(text, depth=32)


@settings(max_examples=200, deadline=None)
@given(values, st.data())
def test_what_is_no_json_is_never_complete(value, data):
    """Bytes of a document are changed, dropped or added."""
    text = bytearray(json.dumps(value, ensure_ascii=data.draw(st.booleans())).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from(b'{}[]",:\\u0-9.e tn\n\x80\xc3').map(lambda byte: bytes([byte])) | st.binary(max_size=2)
        )
    found = read(bytes(text), depth=32)
    if found is not None and complete(found):
        assert is_json(bytes(text)), bytes(text)


@settings(max_examples=100, deadline=None)
@given(values, forms, st.data())
def test_the_cost_is_that_of_the_shortest_ending(value, form, data):
    """From anywhere in a document there is a byte that brings the end one nearer, and none that brings it two."""
    text = json.dumps(value, **form).encode()
    state = read(text[: data.draw(st.integers(0, len(text)))])
    while state is not None and cost(state):
        after = [found for byte in range(256) if (found := step(state, byte, DEPTH)) is not None]
        assert min(map(cost, after)) == cost(state) - 1
        state = min(after, key=cost)
    assert state is None or complete(state)


@pytest.mark.parametrize("text", [b"[1,2]", b'"a"', b"1", b"true"])
def test_an_object_is_asked_for_unless_anything_goes(text):
    assert read(text, "object") is None
    assert read(text, "any") is not None
    assert read(b'{"a": 1}', "object") == END


@pytest.mark.parametrize(
    "text",
    [b"\t{", b"  {", b"\n\n{", b'{\n     "', b'{"a":  1', b'{"a"\n\n:', b"[1 \n", b"[" + b"\n" + b" " * 5],
)
def test_blanks_cannot_run_on(text):
    """One, or a line break and at most four for each open container."""
    assert read(text) is None
    assert read(text.replace(b"  ", b" ").replace(b"\n\n", b"\n").replace(b" \n", b"\n").strip(b"\t")) is not None


@pytest.mark.parametrize(("text", "more"), [(b"1" * 20, b"1"), (b"0." + b"1" * 20, b"1"), (b"1e308", b"0")])
def test_digits_cannot_run_on(text, more):
    found = read(text)
    assert found is not None
    assert complete(found)
    assert read(text + more) is None


@pytest.mark.parametrize("text", [b"01", b"-", b"1.", b"1e", b"1e+", b".5", b"+1", b"--1", b"NaN", b"Infinity", b"nul"])
def test_numbers_and_words_are_those_of_json(text):
    found = read(text)
    assert found is None or not complete(found)


@pytest.mark.parametrize(
    "text",
    [
        *(b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90", b"\xf5", b"\x80", b"\xe0\x80", b"a\xc3b", b"\x1f", b"\n", b"\\x"),
        *(b"\\ud800a", b"\\udc00", b"\\ud800\\n", b"\\ud800\\u0041", b"\\u00g"),
    ],
)
def test_strings_are_valid_utf_8_with_whole_surrogates(text):
    assert read(b'"' + text) is None


def test_a_surrogate_pair_and_a_sign_of_four_bytes_are_taken():
    assert read(b'"\\ud83d\\ude00 ' + "😀é€".encode() + b'"') == END
