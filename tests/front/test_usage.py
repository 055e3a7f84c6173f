"""Exit code 2 is for wrong usage, as docs/commands.md says: no server is asked, nothing is made."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import pytest

from penstock.__main__ import main

NOBODY = "redis://127.0.0.1:1"

WRONG = """
audit train --epoch -1
audit train --repair imagse photos
bad drop train 0
bad list train --epoch -1
bad list train --epoch first
bad retry train 7
bad show train 0 first
completion tcsh
delete
delete train --segments .
demo --epochs 0
doctor 'my stream'
epochs close train -1
epochs pin train newest
epochs retain train 3
export train out --epoch -1
exporter --port 99999
exporter --stream 'my stream'
groups declare train 'my group'
groups drop _train resnet
groups lst train
groups reset train resnet latest
health train
import out train --epoch -1
import out train --payload disk
import out train --retention 3
inspect 'my stream'
inspect --url localhost
inspect --url http://localhost:6379
inspect --url redis://localhost:99999
inspect --url redis://localhost/train
monitor --every 0
monitor --every nan
produce
produce dataset mydata
produce dataset mydata.py:train
produce dataset mydata:train --watch
produce generator
produce generator --pair x
produce generator mydata:train --endless --workers 0
produce images photos --durability disk
produce images photos --follow --no-workers
produce images photos --mode encoded --resize 8
produce images photos --only val
produce images photos --payload disk
produce images photos --queue-url localhost
produce images photos --random-crop 8 --resize 9
produce images photos --resize 8x8 --crop 9x9
produce images photos --retention 3
produce images photos --samples 3
produce images photos --skip-unlabelled
produce images photos --spec '{"x": ["float31", [1]]}'
produce images photos --spec '{"x": 3}'
produce images photos --split train:0.5 --only val
produce images photos --split train:0.9,val:0.3
produce images photos --split train:2
produce images photos --stream 'my stream'
produce images photos --transform augment
produce images photos --url localhost
produce images photos --watch --follow
produce mix --part 1 "images 'photos"
produce mix --part half 'images photos'
produce mix --part -1 'images photos'
produce source mine --option path
produce tar photos --field x
run generator mydata:train --endless --workers 0 -- true
run images photos
run images photos --split train:2 -- true
server --maxmemory much
server --port 99999
show train --epoch -1
show train --id 3/7
show train --interval 0
stat train --epoch -1
stat train --samples 0
tail train --last -3
trim train --keep -1
trim train --keep 1 --bytes 1mb
worker --allow augment --url localhost
worker --allow-any --allow augment
worker --auto --burst
worker --auto --max 0
worker --max 3
worker --processes 0
""".strip().splitlines()


@pytest.mark.parametrize("line", WRONG)
def test_what_means_nothing_is_one_line_and_exit_code_2(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script must be able to tell its own mistake, which no retry fixes, from a server that is away."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_URL", NOBODY)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process must keep its own handlers
    assert main(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []
