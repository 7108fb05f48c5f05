"""The file of named tokens: what it may say, and how it is read again."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from hps.configuration.load import load_configuration
from hps.configuration.tokens import TokenConfig, WatchedTokens, digest_of, load_tokens, published
from hps.errors import ConfigError
from tests.ring1.configuration.test_config_errors import assert_said
from tests.servers.running_service import document_of, model_of

DIGEST = digest_of("a token")


def write(path: Path, *entries: Any) -> Path:
    path.write_text(json.dumps({"tokens": entries}))
    return path


def test_entries_are_read_and_keep_no_token(tmp_path: Path) -> None:
    limits = {"requests_per_s": 10, "burst": 20, "keys_per_s": 1e6}
    path = write(
        tmp_path / "tokens.json",
        {"name": "ranker", "rights": ["lookup"], "sha256": DIGEST.upper(), **limits},
        {"name": "trainer", "rights": ["write", "LOOKUP"], "token": ["s3cret-old", "s3cret-new"]},
        {"name": "ops", "rights": ["admin"], "certificate": "ops.example"},
        {"name": "prometheus", "rights": [], "token": "s3cret"},
    )
    ranker, trainer, ops, prometheus = entries = load_tokens(path)
    assert (ranker.sha256, ranker.requests_per_s, ranker.burst, ranker.keys_per_s) == ((DIGEST,), 10, 20, 1e6)
    assert (trainer.sha256, trainer.rights) == ((digest_of("s3cret-old"), digest_of("s3cret-new")), ("write", "lookup"))
    assert (ops.certificate, ops.sha256, prometheus.rights) == (("ops.example",), (), ())
    assert "s3cret" not in repr(entries)
    again = json.loads(json.dumps(published(entries)))
    assert tuple(map(TokenConfig.model_validate, again)) == entries


GOOD = {"name": "a", "rights": ["lookup"], "sha256": DIGEST}
HIDDEN = "got a value that is not shown, expected"
VISIBLE = f"{HIDDEN} visible ASCII characters (no space, no line end), at least one"


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([{**GOOD, "name": "a b"}], 'tokens[0].name: got "a b", expected 1 to 120 of the characters a-z A-Z 0-9 _ -'),
        ([{**GOOD, "rights": ["adm"]}], 'tokens[0].rights[0]: got "adm", ... lookup, write, files, admin; did you mean admin?'),
        ([{**GOOD, "rights": "lookup"}], 'tokens[0].rights: got "lookup", expected a list; write ["lookup"]'),
        ([{"name": "a", "rights": []}], "tokens[0].certificate: got none, ... one of sha256, token and certificate"),
        ([{**GOOD, "sha256": "s3cret"}], f"tokens[0].sha256[0]: {HIDDEN} the SHA-256 of a token, 64 hexadecimal digits"),
        ([{**GOOD, "token": "s3 cret"}], f"tokens[0].token[0]: {VISIBLE}"),
        ([{**GOOD, "token": ""}], f"tokens[0].token[0]: {VISIBLE}"),
        ([{**GOOD, "burst": 5}], "tokens[0].burst: it has no effect alone, expected requests_per_s, too"),
        ([{**GOOD, "requests_per_s": 0}], "tokens[0].requests_per_s: got 0, expected more than 0"),
        ([{**GOOD, "tokn": "s3cret"}], "tokens[0].tokn: unknown key; did you mean token?"),
        ([GOOD, {**GOOD, "sha256": digest_of("b")}], "tokens: the entries 0 and 1 have the same name, expected it once"),
        ([GOOD, {**GOOD, "name": "b"}], "tokens: the entries 0 and 1 have the same token, expected it once"),
        (
            [{**GOOD, "sha256": digest_of("own")}, {"name": "b", "rights": ["admin"], "token": ["other", "own"]}],
            "tokens: the entries 0 and 1 have the same token, expected it once",
        ),
        (
            [{**GOOD, "certificate": "x"}, {"name": "b", "rights": [], "certificate": ["y", "x"]}],
            "tokens: the entries 0 and 1 have the same certificate, expected it once",
        ),
    ],
)
def test_what_is_wrong_is_said_without_a_token(tmp_path: Path, entries: list[Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tokens(write(tmp_path / "tokens.json", *entries))
    assert_said(caught.value.problems, problem)
    assert "s3" not in str(caught.value).replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"tokens": [', "line 1, column 13: not JSON"),
        ("[]", "top level: got an empty list, expected an object with the key tokens"),
        ("{}", "tokens: missing; it has no default"),
        ('{"tokens": [], "tokens": []}', "tokens: appears more than once in this object; keep one"),
        (None, "file: cannot be read (No such file or directory); expected the path of a file of tokens"),
    ],
)
def test_what_is_no_file_of_tokens_is_an_error(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "tokens.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_tokens(path)
    assert caught.value.problems[0].startswith(problem)


def test_a_file_is_read_again_and_a_wrong_one_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "tokens.json", GOOD)
    watched = WatchedTokens(str(path))
    assert not watched.poll()
    path.write_text('{"tokens": [')
    with caplog.at_level(logging.INFO):
        assert [watched.poll() for _ in range(4)] == [False] * 4
    assert [entry.name for entry in watched.entries] == ["a"]
    assert [(record.levelname, "the tokens stay as they are" in record.message) for record in caplog.records] == [
        ("ERROR", True)
    ]
    write(path, GOOD, {**GOOD, "name": "b", "sha256": digest_of("b")})
    assert [watched.poll() for _ in range(3)] == [False, True, False]
    assert [entry.name for entry in watched.entries] == ["a", "b"]


def test_a_file_that_is_wrong_from_the_beginning_lets_nobody_in_until_it_is_right(tmp_path: Path) -> None:
    watched = WatchedTokens(str(tmp_path / "tokens.json"))
    assert watched.entries == ()
    write(tmp_path / "tokens.json", GOOD)
    assert [watched.poll() for _ in range(3)] == [False, True, False]
    assert [entry.name for entry in watched.entries] == ["a"]


def test_a_key_or_an_authority_alone_has_no_effect() -> None:
    def load(**service: str) -> Any:
        return load_configuration(document_of(model_of("m", ["x"], {"t": 1}), service=service))

    for key in ("tls_key_path", "tls_client_ca_path"):
        with pytest.raises(ConfigError, match=f"service.{key}: it has no effect alone, expected tls_certificate_path, too"):
            load(**{key: "x.pem"})
        load(**{key: "x.pem"}, tls_certificate_path="y.pem")
