"""HTTP/1.1 without I/O: what two readers could read differently is refused, and answers end where their heads say."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.errors import RemoteError
from hps.ground.http1 import MAX_HEADERS, AnswerReader, Chunks, Head, MalformedRequestError


def head_of(*lines, request=b"POST /v2/models/m/infer HTTP/1.1"):
    return Head(b"\r\n".join([request, *lines, b"", b""]))


def test_a_head_is_read():
    head = head_of(b"Host: h", b"Content-Length: 12", b"X-A: b", request=b"POST /v2/models/m/infer?x=%20 HTTP/1.1")
    assert (head.method, head.path, head.target) == ("POST", "/v2/models/m/infer", b"/v2/models/m/infer?x=%20")
    assert head.lines == [(b"host", b"h"), (b"content-length", b"12"), (b"x-a", b"b")]
    assert head.headers == dict(head.lines)
    assert (head.length, head.keeps_alive, head.expects_continue) == (12, True, False)


def test_targets_in_all_forms_name_their_path():
    for sent, target, path in (
        (b"/v2/models/a%20b/infer", None, "/v2/models/a b/infer"),
        (b"/v2/%6dodels", None, "/v2/models"),
        (b"/a?b=/c", None, "/a"),
        (b"http://h:80/v2/models/m/infer?a=b", b"/v2/models/m/infer?a=b", "/v2/models/m/infer"),
        (b"HTTPS://h/", b"/", "/"),
        (b"http://h?a", b"/?a", "/"),
        (b"/http://h/a", None, "/http://h/a"),
        (b"*", None, "*"),
    ):
        head = head_of(request=b"OPTIONS %s HTTP/1.1" % sent)
        assert (head.target, head.path) == (target or sent, path)


KEPT = {True: [(b"1.1", []), (b"1.0", [b"Connection: keep-alive"])], False: [(b"1.0", [])]}
KEPT[False] += [(b"1.1", [b"Connection: close"]), (b"1.1", [b"Connection: x, Close"])]


@pytest.mark.parametrize("keeps", KEPT)
def test_a_client_says_whether_its_connection_stays(keeps):
    bodies = ([], [b"Content-Length: 0"], [b"Content-Length: 3"])
    for (version, lines), method, body in itertools.product(KEPT[keeps], (b"GET", b"POST"), bodies):
        head = head_of(*lines, *body, request=b"%s / HTTP/%s" % (method, version))
        assert (head.keeps_alive, head.needs_keep_alive) == (keeps, keeps and version == b"1.0")


def test_the_length_of_a_body_is_known_from_its_head():
    for value, length in ((b"0", 0), (b"5", 5), (b"\t5 ", 5), (b"005", 5), (b"9" * 15, 10**15 - 1)):
        for name in (b"Content-Length: ", b"content-LENGTH:"):
            assert head_of(name + value).length == length
            assert head_of(b"Connection: upgrade", b"Upgrade: h2c", name + value).length == length
    assert head_of().length == 0
    assert head_of(b"Transfer-Encoding: chunked").length == head_of(b"transfer-encoding:  Chunked ").length == -1
    with pytest.raises(MalformedRequestError, match="Transfer-Encoding"):
        head_of(b"Transfer-Encoding: chunked", b"Connection: keep-alive", request=b"POST / HTTP/1.0")


IN_DOUBT = {
    "both": [[b"Content-Length: 5", b"Transfer-Encoding: chunked"], [b"Transfer-Encoding: chunked", b"Content-Length: 5"]],
    "two lengths": [[b"Content-Length: 5", b"Content-Length: 5"], [b"Content-Length: 5", b"Content-Length: 6"]],
    "two numbers": [[b"Content-Length: 5, 5"], [b"Content-Length: 5 6"]],
    "a sign": [[b"Content-Length: -5"], [b"Content-Length: +5"]],
    "no decimal": [[b"Content-Length: 0x5"], [b"Content-Length: 5.0"], [b"Content-Length: "]],
    "too large": [[b"Content-Length: " + b"9" * 20], [b"Content-Length: " + b"9" * 40]],
    "a space": [[b"Content-Length : 5"], [b"Content-Length\t: 5"]],
    "not chunked": [[b"Transfer-Encoding: gzip"], [b"Transfer-Encoding: identity"], [b"Transfer-Encoding: "]],
    "not only chunked": [[b"Transfer-Encoding: gzip, chunked"], [b"Transfer-Encoding: chunked, gzip"]],
    "chunked twice": [[b"Transfer-Encoding: chunked, chunked"], [b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"]],
    "two encodings": [[b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked"], [b"Transfer-Encoding:", b" chunked"]],
    "nearly chunked": [[b"Transfer-Encoding: xchunked"], [b"Transfer-Encoding: \x0bchunked"]],
    "an upgrade": [[b"Connection: upgrade", b"Upgrade: h2c", b"Content-Length: 5", b"Content-Length: 5"]],
}


@pytest.mark.parametrize("why", IN_DOUBT)
def test_a_body_whose_end_is_in_doubt_is_refused(why):
    for lines in IN_DOUBT[why]:
        with pytest.raises(MalformedRequestError):
            head_of(*lines)


SINGLE = ["Authorization", "Host", "Content-Type", "Content-Encoding", "Content-Length", "Inference-Header-Content-Length"]


@pytest.mark.parametrize("name", SINGLE)
def test_a_header_of_which_one_alone_may_be_is_refused_where_there_are_two(name):
    one, other = f"{name}: 5".encode(), f"{name.lower()}: 6".encode()
    for lines in ([one, other], [one, b"X: y", one]):
        with pytest.raises(MalformedRequestError):
            head_of(*lines)
    assert head_of(one, b"Accept: a", b"accept: b").headers[b"accept"] == b"b"


X, EVIL = b"POST /x HTTP/1.1\r\n", b"GET /evil HTTP/1.1\r\nB: c\r\n\r\n"
NO_HEADS = {
    "a line that goes on": [X + b"A: b\r\n c\r\n\r\n"],
    "zeros": [X + b"A: b\x00c\r\n\r\n", X + b"A\x00: b\r\n\r\n", b"POST /x\x00 HTTP/1.1\r\nA: b\r\n\r\n"],
    "bare ends of lines": [b"POST /x HTTP/1.1\nA: b\r\n\r\n", X + b"A: b\nB: c\r\n\r\n", X + b"A: b\rB: c\r\n\r\n"],
    "two requests": [X + b"A: b\n\n" + EVIL, X + b"A: b\r\n\n" + EVIL, X + b"A: b\n\r\n" + EVIL],
    "no header": [X + b": b\r\n\r\n", X + b" A: b\r\n\r\n", X + b"A b\r\n\r\n"],
    "another line of request": [b"POST /x y HTTP/1.1\r\n\r\n", b"POST /x HTTP/1.1 \r\n\r\n", b"POST /x\r\n\r\n"],
    "another version": [b"POST /x HTTP/1.2\r\n\r\n", b"POST /x HTTP/2.0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"],
    "another method": [b"CONNECT a:80 HTTP/1.1\r\n\r\n", b"BREW /x HTTP/1.1\r\n\r\n", b"post /x HTTP/1.1\r\n\r\n"],
    "TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"],
}


@pytest.mark.parametrize("why", NO_HEADS)
def test_what_is_not_http_1_1_is_refused(why):
    for raw in NO_HEADS[why]:
        with pytest.raises(MalformedRequestError):
            Head(raw)


def test_a_head_has_at_most_so_many_headers():
    lines = [b"a%d: b" % nth for nth in range(MAX_HEADERS + 1)]
    assert len(head_of(*lines[1:]).lines) == MAX_HEADERS
    with pytest.raises(MalformedRequestError, match="got 129 headers, expected at most 128"):
        head_of(*lines)


def test_a_client_may_wait_before_it_sends_its_body():
    values = (b"100-continue", b"100-Continue", b"200-ok")
    assert [head_of(b"Expect: " + value).expects_continue for value in values] == [True, True, False]


@given(st.binary(max_size=200))
def test_random_bytes_are_a_head_or_are_refused(content):
    try:
        head = Head(b"POST /x HTTP/1.1\r\n" + content + b"\r\n\r\n")
    except MalformedRequestError:
        return
    assert head.length >= -1
    assert (head.method, head.target) == ("POST", b"/x")


def feed(raw, cuts=()):
    """Feed bytes in pieces; return the body taker and what was left."""
    chunks, at = Chunks(), 0
    for cut in [*sorted(cuts), len(raw)]:
        while at < cut and not chunks.done:
            used = chunks.feed(memoryview(raw)[at:cut])
            assert used > 0
            at += used
    return chunks, raw[at:]


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.lists(st.sampled_from([b"", b";a", b' ; a="b;c"', b"\t"]), min_size=7, max_size=7),
    st.booleans(),
    st.lists(st.sampled_from([b"a: b\r\n", b"x:\r\n"]), max_size=3),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_a_body_is_the_same_however_it_arrives(pieces, extensions, upper, trailers, cuts):
    raw = b""
    for piece, extension in zip(pieces, extensions, strict=False):
        size = b"%X" % len(piece) if upper else b"00%x" % len(piece)
        raw += size + extension + b"\r\n" + piece + b"\r\n"
    raw += b"0" + extensions[-1] + b"\r\n" + b"".join(trailers) + b"\r\n"
    following = b"GET / HTTP/1.1\r\n\r\n"
    for positions in ((), cuts, range(len(raw))):
        chunks, left = feed(raw + following, [cut for cut in positions if cut < len(raw)])
        assert chunks.done
        assert bytes(chunks.body) == b"".join(pieces)
        assert left == following


NO_CHUNKS = {
    "no size": [b"\r\n", b"g\r\n", b";a\r\n", b" 1\r\na\r\n", b"1 1\r\na\r\n", b"1_0\r\n"],
    "a sign or a prefix": [b"-1\r\n", b"+1\r\na\r\n", b"0x1\r\na\r\n", b"0X1\r\na\r\n"],
    "more in the line": [b"1\x00\r\na\r\n", b"1\x0b\r\na\r\n", b"1\na\r\n", b"1\r\r\na\r\n"],
    "another end": [b"1\r\nab", b"1\r\na\n", b"1\r\na\rb", b"1\r\na0\r\n\r\n", b"0\r\n\n", b"0\r\na: b\n"],
    "too large": [b"f" * 16 + b"\r\n", b"0;" + b"a" * 5000, b"0\r\n" + b"a" * 5000],
    "too many trailers": [b"0\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1)],
}


@pytest.mark.parametrize("why", NO_CHUNKS)
def test_what_is_no_chunk_is_refused(why):
    for raw in NO_CHUNKS[why]:
        for cuts in ((), range(len(raw))):
            with pytest.raises(MalformedRequestError):
                feed(raw, cuts)


def test_a_chunk_of_the_largest_size_is_waited_for():
    chunks, _ = feed(b"f" * 15 + b"\r\nabc")
    assert (chunks.done, bytes(chunks.body)) == (False, b"abc")


@given(st.binary(max_size=120), st.lists(st.integers(0, 120), max_size=8))
def test_random_bytes_are_refused_or_waited_for_alike_however_they_arrive(raw, cuts):
    results = []
    for positions in ((), [cut for cut in cuts if cut < len(raw)]):
        try:
            chunks, left = feed(raw, positions)
        except MalformedRequestError:
            results.append("refused")
        else:
            results.append((chunks.done, bytes(chunks.body), left))
    assert results[0] == results[1]


OK = b"HTTP/1.1 200 OK\r\nContent-"
ANSWERS = {
    "with a length": (OK + b"Length: 4\r\n\r\nbody", b"body", True),
    "in chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\nbo\r\n2\r\ndy\r\n0\r\n\r\n", b"body", True),
    "without a body": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "the last": (OK + b"Length: 0\r\nConnection: Close\r\n\r\n", b"", False),
    "of HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", b"a", False),
    "after interim ones": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + OK + b"Length: 1\r\n\r\na",
        b"a",
        True,
    ),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_ends_where_its_head_says_however_it_arrives(kind):
    raw, body, keeps_alive = ANSWERS[kind]
    for step in (1, 7, len(raw)):
        reader = AnswerReader(keep_body=True)
        ends = [reader.feed(raw[at : at + step]) for at in range(0, len(raw), step)]
        assert ends == [False] * (len(ends) - 1) + [True]
        assert (bytes(reader.body), reader.keeps_alive) == (body, keeps_alive)
    with pytest.raises(RemoteError, match="more follows"):
        AnswerReader().feed(raw + b"HTTP")


def test_an_answer_to_head_has_no_body():
    reader = AnswerReader(head_only=True)
    assert reader.feed(OK + b"Length: 4\r\n\r\n")
    assert not reader.keeps_alive


NO_ANSWERS = {
    "another protocol": b"SSH-2.0\r\n\r\n",
    "no status": b"HTTP/1.1 ok\r\n\r\n",
    "no length": b"HTTP/1.1 200 OK\r\n\r\n",
    "a negative length": OK + b"Length: -1\r\n\r\n",
    "a length of many digits": OK + b"Length: " + b"1" * 16 + b"\r\n\r\n",
    "no chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
    "no end of the head": b"a" * 70_000,
    "no end of interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * 3000,
}


@pytest.mark.parametrize("why", NO_ANSWERS)
def test_what_is_no_answer_with_an_end_is_refused(why):
    with pytest.raises(RemoteError):
        AnswerReader().feed(NO_ANSWERS[why])
