"""The environment: defaults, one server for both roles unless said otherwise, and errors that name the variable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock_common.settings import DEFAULT_URL, BadSettings, Settings, child_environment, file_with_login


def test_an_empty_environment_means_a_local_server(tmp_path: Path) -> None:
    """A first try needs no setting, and an empty variable counts as unset."""
    assert Settings.from_environment({}) == Settings.from_environment({"PENSTOCK_URL": ""}) == Settings()
    alone = Settings.from_environment({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert (alone.url, alone.queue_url) == (DEFAULT_URL, DEFAULT_URL)


def test_jobs_live_with_the_streams_unless_said_otherwise() -> None:
    """One variable is enough for one server."""
    one = Settings.from_environment({"PENSTOCK_URL": "rediss://user:pw@host:1/2"})
    assert one.queue_url == one.url == "rediss://user:pw@host:1/2"
    two = Settings.from_environment({"PENSTOCK_URL": "redis://a", "PENSTOCK_QUEUE_URL": "unix:///run/redis.sock"})
    assert (two.url, two.queue_url) == ("redis://a", "unix:///run/redis.sock")


@pytest.mark.parametrize(
    "bad", ["localhost:6379", "http://host", "redis://", "redis://host:port", "redis://[::1", "unix://"]
)
@pytest.mark.parametrize("variable", ["PENSTOCK_URL", "PENSTOCK_QUEUE_URL"])
def test_a_malformed_url_is_an_error_that_names_the_variable(variable: str, bad: str) -> None:
    """Otherwise it surfaces as a connection error far from its cause."""
    with pytest.raises(BadSettings) as caught:
        Settings.from_environment({variable: bad})
    assert str(caught.value) == f"{variable}={bad!r}: expected one URL like {DEFAULT_URL}; correct or unset it"
    assert caught.value.variable == variable


def test_a_malformed_url_does_not_print_its_password() -> None:
    """Errors end up in logs."""
    with pytest.raises(BadSettings) as caught:
        Settings.from_environment({"PENSTOCK_URL": "http://me:secret@host"})
    assert caught.value.found == "http://...@host"


def test_white_space_around_a_url_is_left_out() -> None:
    """Secrets often end with a newline, and a blank is seen by nobody."""
    assert Settings.from_environment({"PENSTOCK_URL": " redis://:pw@host \n"}).url == "redis://:pw@host"


@pytest.mark.parametrize("variable", ["PENSTOCK_URL", "PENSTOCK_QUEUE_URL"])
def test_a_url_can_be_a_secret_in_a_file(variable: str, tmp_path: Path) -> None:
    """Containers get passwords as files, because anyone who inspects a container sees its environment."""
    file = tmp_path / "secret"
    file.write_text("\ufeffredis://default:pw@host:1\n", encoding="utf-8")  # as an editor of Windows begins it
    found = Settings.from_environment({f"{variable}_FILE": str(file)})
    assert (found.named_url if variable == "PENSTOCK_URL" else found.named_queue_url) == "redis://default:pw@host:1"
    assert found.queue_url == "redis://default:pw@host:1"


@pytest.mark.parametrize(
    ("url", "server", "is_its"),
    [
        ("redis://bob:pw@host", "redis://bob@host:6379", True),
        ("rediss://bob:pw@host:1/2?ssl_ca_certs=ca.crt", "rediss://bob@host:1/2", True),
        ("redis://:pw@[::1]:1", "redis://[::1]:1", True),
        ("redis://bob:pw@a:1,b:1", "redis://bob@10.0.0.1:1", True),
        ("redis://bob:pw@host", "redis://eve@host:6379", False),
        ("redis://bob:pw@host:1", "redis://bob@host:2", False),
        ("redis://[bob", "redis://[bob", False),
    ],
)
def test_a_refused_login_is_corrected_in_its_file(
    url: str, server: str, is_its: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice to change a URL sends a user with a file to the wrong place. A URL of an argument is not in the file."""
    file = tmp_path / "secret"
    file.write_text(f"{url}\n")
    for variable in ("PENSTOCK_URL_FILE", "PENSTOCK_QUEUE_URL_FILE"):
        monkeypatch.setenv(variable, str(file))
        assert file_with_login(server) == ((variable, str(file)) if is_its else None)
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "a file that can be read (No such file or directory)"),
        (b"", "a file that holds a URL (it is empty)"),
        (b" \n", "a file that holds a URL (it is empty)"),
        (b"\xff\xfe", "a file that can be read (it is no text)"),
        (b"hunter2", f"a file that holds one URL like {DEFAULT_URL}"),
        (b"redis://:hunter2@a\nredis://b", f"a file that holds one URL like {DEFAULT_URL}, not 2 lines"),
        (b"# the server\nredis://:hunter2@a", f"a file that holds one URL like {DEFAULT_URL}, not 2 lines"),
        (b"redis://:hunter2@a redis://b", f"a file that holds one URL like {DEFAULT_URL}, without blanks"),
    ],
)
@pytest.mark.parametrize("variable", ["PENSTOCK_URL_FILE", "PENSTOCK_QUEUE_URL_FILE"])
def test_a_useless_secret_file_is_named_and_not_shown(
    variable: str, content: bytes | None, expected: str, tmp_path: Path
) -> None:
    """Most often the path is wrong, or the file holds the password alone. Neither belongs in a log."""
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadSettings) as caught:
        Settings.from_environment({variable: str(file)})
    assert str(caught.value) == f"{variable}={str(file)!r}: expected {expected}; correct or unset it"
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("variable", ["PENSTOCK_URL", "PENSTOCK_QUEUE_URL"])
def test_a_url_and_a_file_with_one_are_one_too_many(variable: str, tmp_path: Path) -> None:
    """The intended server cannot be guessed."""
    with pytest.raises(BadSettings, match=f"{variable}_FILE=.*expected nothing, because {variable} is set too"):
        Settings.from_environment({variable: "redis://a", f"{variable}_FILE": str(tmp_path / "secret")})


def test_any_value_of_no_color_counts() -> None:
    """no-color.org asks for it."""
    assert Settings.from_environment({"NO_COLOR": "whatever"}).no_color
    assert not Settings.from_environment({"NO_COLOR": ""}).no_color


def test_a_child_gets_our_environment_and_what_we_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """`penstock run` tells the trainer where the server is, and takes nothing away."""
    monkeypatch.setenv("HERE", "1")
    monkeypatch.setenv("PENSTOCK_URL_FILE", "/run/secrets/url")
    child = child_environment({"PENSTOCK_URL": "redis://x"})
    assert (child["HERE"], child["PENSTOCK_URL"]) == ("1", "redis://x")
    assert "PENSTOCK_URL_FILE" not in child  # both together would be an error


def test_a_trainer_knows_which_streams_are_prepared_for_it() -> None:
    """For these it waits as long as it takes; for a mistyped one it does not."""
    assert Settings.from_environment({"PENSTOCK_AWAITED": "train.a,train.b"}).awaited == {"train.a", "train.b"}
    assert Settings.from_environment({}).awaited == frozenset()


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("PENSTOCK_REDIS_URL", "did you mean PENSTOCK_URL?"),
        ("PENSTOCK_HOST", "did you mean PENSTOCK_URL?"),
        ("PENSTOCK_UR", "did you mean PENSTOCK_URL?"),
        ("PENSTOCK_SEGMENT", "did you mean PENSTOCK_SEGMENTS?"),
        (
            "PENSTOCK_FOLDER",
            "Penstock reads PENSTOCK_AWAITED, PENSTOCK_CACHE, PENSTOCK_GATEWAY_TOKENS, PENSTOCK_QUEUE_URL, ",
        ),
    ],
)
def test_a_variable_that_nothing_reads_is_named_once(
    variable: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt one leaves its setting at the default, and the stream is looked for on another server."""
    for _ in range(2):
        Settings.from_environment({variable: "redis://:secret@host", "PENSTOCK_URL": "redis://host"})
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith(f"penstock: {variable} is set, and nothing reads it; {advice}")
    assert "secret" not in told[0]


def test_what_compose_reads_is_nobodys_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell that starts the stack has its variables, and then runs `penstock monitor`, too."""
    compose = (Path(__file__).parents[2] / "compose.yaml").read_text(encoding="utf-8")
    names = set(re.findall(r"\$\{(PENSTOCK_\w+)", compose))
    assert len(names) == 10
    Settings.from_environment(dict.fromkeys(names, "1"))
    assert capsys.readouterr().err == ""
