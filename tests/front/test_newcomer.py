"""Fifty wrong command lines of a new user: each error says what was found, and what to do."""

from __future__ import annotations

import io
import os
import shlex
import signal
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import penstock
from penstock.__main__ import main
from penstock_common.stream.client import connect
from penstock_common.stream.directory import list_streams
from penstock_common.stream.servers.embedded import EmbeddedServer

ANSWERS = {
    # the command line
    "prodcue images photos": (2, "unknown command 'prodcue'; did you mean 'produce'?"),
    "help": (2, "did you mean '--help'?"),
    "--url redis://h produce images photos": (
        2,
        "--url is an option of a command, so it follows the command: type `penstock produce images photos --url redis",
    ),
    "--workers 2 run images photos -- python a.py": (2, "`penstock run images photos --workers 2 -- python a.py`"),
    "produce image photos": (2, "type `penstock produce images photos`"),
    "produce images photos --transfrom a:b": (2, "unknown argument '--transfrom' (did you mean --transform?)"),
    "produce images photos --batch-size 64": (2, "unknown argument '--batch-size'; see penstock produce images --help"),
    "produce images photos --resize 224,224": (2, "'224,224' is not a size like 224x224"),
    "produce images photos --spec 'x=uint8'": (2, """'x=uint8' is not a spec like {"x": ["uint8", [28, 28, 1]]}"""),
    "groups train": (2, "there are list, declare, drop, reset: type `penstock groups list train`"),
    "epochs train": (2, "type `penstock epochs list train`"),
    "bad lsit train": (2, "type `penstock bad list train`"),
    "run images photos python train.py": (2, "goes after --, as in `penstock run images photos -- python train.py`"),
    "run": (2, "required: SOURCE: type `penstock run images photos/ --resize 224x224`"),
    "train photos": (2, "unknown command 'train'; did you mean 'run'?"),
    "groups list": (2, "required: stream: type `penstock groups list train`"),
    "groups drop train": (2, "required: name: type `penstock groups drop train resnet`"),
    "health trainer train": (2, "required: --group: type `penstock health trainer train --group resnet`"),
    "produce images photos --resize 64 64": (2, "unknown argument '64' (--resize takes one value, HxW)"),
    "produce images photos --flip true": (2, "unknown argument 'true' (--flip takes no value)"),
    "produce images photos/0.png photos/1.png": (2, "unknown argument 'photos/1.png' (DIR is one: folder, or file end"),
    "produce images photos -- python train.py": (2, "(`penstock run` starts a training command; this one"),
    "train.py --lr 1": (2, "type `penstock run images photos/ -- python train.py --lr 1`"),
    "produce images photos --epochs 1.5": (2, "'1.5' is not a whole number from 1"),
    "produce images photo": (
        1,
        "no image folder at photo: found nothing there; give a folder or a .zip of images; did you",
    ),
    "produce images some.tar": (1, "some.tar is no image folder: a tar is read by `penstock produce tar some.tar`"),
    "produce images photos --labels labls.csv": (1, "No such file or directory; did you mean labels.csv?"),
    "export train a.npy": (1, "a.npy cannot be exported to: it is a file, expected a folder: name a new one"),
    "produce webdataset photos/0.tar": (2, "'webdataset' is no kind of source; there are"),
    "produce imagefolder photos": (2, "type `penstock produce images photos`"),
    "import export train --budget 0": (2, "'0' is 0 bytes, too little to hold a block: give 4kb or more, as in 2gb"),
    "produce images photos --budget 1": (2, "'1' is 1 bytes, too little to hold a block: give 4kb or more, as in 2gb"),
    "produce dataset mydata:Sized": (
        1,
        "make the object in mydata, sized_made = Sized(...), and give mydata:sized_made",
    ),
    "produce images photos --transform mydata:resized": (
        1,
        "a sample is a dict of arrays, sample['x']: for an image wr",
    ),
    "produce arrays cut.npy": (1, "cut.npy is not a readable .npy: it is cut off, shorter than its header says"),
    "produce arrays objects.npy": (1, "it holds Python objects, which are pickles and never read: save texts as"),
    "produce tar some.tar --field y=label": (
        1,
        "no sample has a .label; the tars hold .txt, .cls, and a field is named ",
    ),
    "worker 4": (2, "unknown argument '4' (only options are taken)"),
    "worker --workers 4": (2, "unknown argument '--workers' (did you mean --processes?)"),
    "produce dataset mydata.py": (2, "'mydata.py' is not an import name; write module:attribute, like mydata:NAME"),
    "produce dataset mydata.data": (2, "like mydata:data"),
    "produce dataset mydata:data(3)": (2, "is a call, expected an import name: write mydata:data, which is called"),
    "server --maxmemory 2": (2, "'2' is too little to hold a stream: give 64mb or more, as in 2gb"),
    "epochs drop train 0": (2, "'drop' is no action; there are list, close, abandon, pin, unpin, retain; see penst"),
    "groups reset train resnet": (2, "required: epoch: type `penstock groups reset train resnet 0`"),
    "stat train --tensor x": (2, "unknown argument '--tensor' (it takes --url, --json, "),
    "worker --allow 'a b'": (2, "'a b' is no module or module:name, like augment or augment:flip"),
    "worker --allow augment.py": (2, "'augment.py' is no module or module:name, like augment"),
    "worker --root nodir": (2, "--root nodir: found nothing there, expected a folder that jobs may read"),
    "worker --queue ''": (2, "'' is no name; the queue of `penstock produce` is called penstock"),
    "doctor --queue ''": (2, "'' is no name; the queue of `penstock produce` is called penstock"),
    "produce images photos --classes cat,dog,cat": (2, "'cat,dog,cat' names 'cat' twice; each class once, in the ord"),
    "produce source nosuch": (1, "A package brings one by an entry point of the group 'penstock.sources'"),
    "produce keras mydata:number": (
        1,
        "mydata:number is unknown: TypeError: object of type 'int' has no len(); a Keras Py",
    ),
    "produce images photos --labels mydata.py": (1, "is not JSON: Expecting value: line 1 column 1 (char 0); labels"),
    # what is read
    "produce dataset mydata:number": (1, "mydata:number is an int; expected an object with len() and items by index ("),
    "produce keras mydata:Rows": (1, "what gives single samples is read by the source kind dataset"),
    "produce images phtos": (1, "no image folder at phtos: found nothing there; give a folder or a .zip"),
    "produce images 'photos/*.png'": (1, "photos/*.png is a pattern, expected a folder: give photos/, which is read"),
    "produce tar 'photos/{0..1}.tar'": (
        1,
        "no tars at photos/0.tar, one of the 2 names of photos/{0..1}.tar: found no",
    ),
    "produce tar photos/0.tar photos/1.tar": (2, "or a quoted pattern: 'train-{0000..0099}.tar')"),
    "produce generator mydata:broken": (1, "mydata:broken gave nothing to iterate: ValueError: no such table (mydata"),
    "produce generator mydata:argued": (1, "TypeError: argued() missing 1 required positional argument: 'path'"),
    "produce images text": (1, "no images in text: found 1 x .txt; images are files ending in .jpg"),
    "produce images photos/0.png": (1, "found a file that is no .zip there; give a folder"),
    "produce images a.zip": (1, "a.zip is not a readable zip"),
    "produce images photos --labels missing.csv": (1, "labels file missing.csv: No such file or directory"),
    "produce images photos --transform augment:flip": (1, "no module 'augment' on the import path or in "),
    "produce dataset mydata:dta": (1, "mydata has no 'dta'; did you mean data?"),
    "produce dataset mydata:zzz": (
        1,
        "mydata has no 'zzz'; it has Rows, Sized, argued, both, broken, data, number, resized",
    ),
    "produce dataset photos/": (2, "type `penstock produce images photos/`"),
    "produce arrays a.npy": (1, "a.npy is not a readable .npy: it does not begin as numpy.save writes it"),
    # the server
    "inspect train --url redis://127.0.0.1:1": (1, "no Redis answers at redis://127.0.0.1:1"),
    "inspect train --url redis://:wrong@127.0.0.1:{port}": (1, "refused the login (invalid username-password pair"),
    "inspect train --url redis://127.0.0.1:{port}": (1, "put user and password into the URL"),
    "inspect train --url redis://127.0.0.1:{http}": (1, "does not speak the Redis protocol"),
    "inspect train --url 127.0.0.1:{port}": (2, "it does not begin with redis://): write redis://host:6379/0"),
    "server --port {port}": (1, "port {port} on 127.0.0.1 is already in use; choose another"),
    "exporter --bind 192.0.2.1": (1, "give another --bind"),
    # # streams and groups
    "inspect trian": (1, "no stream 'trian'; streams there: train; did you mean 'train'?"),
    "show train --tensor image": (1, "no tensor 'image'; the stream has x, y"),
    "stat train --epoch 7": (1, "stream 'train' has no epoch 7; retained epochs: 0"),
    "delete train": (1, "give --yes to do it without being asked"),
    "import photos train": (1, "is no export: it has no export.json; `penstock export STREAM DIR` makes one"),
    "show train --out sheet.pdf": (2, "'sheet.pdf': a PNG is written, so give a name that ends in .png"),
    "produce tar tars --field x=jpg --field x=cls": (2, "--field x is given twice, with 'jpg' and 'cls'"),
    "produce images photos --stream a --stream b": (2, "--stream is given twice, with 'a' and 'b': once is enough"),
    "produce images split": (
        1,
        "its folders are parts, train, val, and below them lie cat, dog: give one of",
    ),
    "produce images photos --balance": (
        1,
        "there is no tensor 'y' to balance by: images have one from their cla",
    ),
    "produce mix --part 3 images photos/ --part 1 images flat/": (
        2,
        "a source of several words stands in quotes: --part 3 'images photos/",
    ),
    "import nowhere train": (
        1,
        "there is no folder {folder}/nowhere: name the one that `penstock export",
    ),
    "produce images photos --transform mydata:both": (
        1,
        "a transform of two parameters is given (sample, rng)",
    ),
    "inspect train --url redis://:p@ss/w#d@127.0.0.1": (
        2,
        "in a user or password write %2F for /, %3F for ?, %23 f",
    ),
    "export train /dev/null/out": (1, "/dev/null/out cannot be exported to: Not a directory"),
}


MYDATA = """
data = [1, 2, 3]
number = 5


def broken():
    raise ValueError("no such table")


def argued(path):
    yield path


def both(x, y):
    return {"x": x[:4] + y}


def resized(sample):
    return sample.resize((8, 8))


class Sized:
    def __init__(self, size):
        self.size = size


class Rows:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"x": [0.0, 1.0], "y": index}
"""


@pytest.fixture(scope="module")
def http() -> Iterator[int]:
    """Return the port of a server that speaks HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """Start a server with a password and one stream. Nothing here changes it."""
    with EmbeddedServer() as running:
        spec = {"x": ("uint8", (2,)), "y": ("int64", ())}
        with penstock.Writer("train", url=running.url, spec=spec) as writer, writer.epoch() as epoch:
            epoch.write({"x": np.zeros(2, np.uint8), "y": 1})
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of a new user."""
    here = tmp_path_factory.mktemp("newcomer")
    (here / "photos").mkdir()
    (here / "text").mkdir()
    Image.new("RGB", (8, 8)).save(here / "photos" / "0.png")
    for place in ("split/train/cat", "split/train/dog", "split/val/cat"):
        (here / place).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(here / place / "0.png")
    for name in ("text/a.txt", "a.zip", "a.npy"):
        (here / name).write_text("words")
    (here / "mydata.py").write_text(MYDATA)
    (here / "labels.csv").write_text("file,y\n0.png,1\n")
    np.save(here / "cut.npy", np.zeros((100, 100)))
    os.truncate(here / "cut.npy", 4000)
    np.save(here / "objects.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    with tarfile.open(here / "some.tar", "w") as tar:
        for name, data in (("0.txt", b"words"), ("0.cls", b"1")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return here


@pytest.mark.parametrize("line", ANSWERS)
def test_a_wrong_line_is_answered_by_what_was_found_and_what_to_do(
    line: str, server: EmbeddedServer, http: int, folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A new user who gets a traceback, or wrong advice, tries another tool."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PENSTOCK_URL", server.url)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process must keep its own handlers
    places = {"port": str(server.port), "http": str(http), "folder": str(folder)}
    given, (code, words) = line, ANSWERS[line]
    for name, value in places.items():
        given, words = (text.replace(f"{{{name}}}", value) for text in (given, words))
    assert main(shlex.split(given)) == code
    out, err = capsys.readouterr()
    told = [each for each in err.splitlines() if each.startswith("penstock")]
    assert (out, len(told)) == ("", 1)
    assert words in told[0]
    with connect(server.url) as client:
        assert list_streams(client) == ["train"]


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (
            "train.py --lr 1",
            "a Python file is started by Python: write -- python train.py --lr 1",
        ),
        (
            "python trian.py",
            "no file trian.py; did you mean train.py?",
        ),
        (
            "pyhton train.py",
            "no such command; did you mean python?",
        ),
        (
            "trainit train.py",
            "No such file or directory: after -- comes a command as you would type",
        ),
        (
            "CUDA_VISIBLE_DEVICES=0 python train.py",
            "write -- env CUDA_VISIBLE_DEVICES=0 python train.py",
        ),
        (
            "source venv/bin/activate",
            "it is a word of the shell: write -- bash -c 'source venv/bin/activate && python ...'",
        ),
        (
            "'python train.py'",
            "command and arguments are words of their own: write -- python train.py",
        ),
    ],
)
def test_a_training_command_that_cannot_start_is_explained(
    command: str, answer: str, server: EmbeddedServer, folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An error of "No such file" about an existing file does not help."""
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text("import penstock\n")
    monkeypatch.setenv("PENSTOCK_URL", server.url)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["run", "images", "photos", "--", *shlex.split(command)]) == 1
    assert answer in capsys.readouterr().err


def test_a_training_command_that_was_killed_is_told(
    server: EmbeddedServer, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that took too much memory ends without a message, and few users know code 137."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PENSTOCK_URL", server.url)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    killed = ["python", "-c", "import os; os.kill(os.getpid(), 9)"]
    assert main(["run", "images", "photos", "--stream", "killed", "--", *killed]) == 137
    assert "python was ended by signal 9 (SIGKILL)" in capsys.readouterr().err
    assert main(["delete", "killed", "--yes", "--force"]) == 0
