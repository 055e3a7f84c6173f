"""The trainers in Node: they prove the payloads that Python makes, or every sample would count as corrupt."""

from __future__ import annotations

import base64
import json
import subprocess

import numpy as np

from chaos.node_trainer import NODE, ROOT
from chaos.payload import sample

PROVE = """
import { prove } from "%s/chaos/payload.mjs";
let text = "";
for await (const part of process.stdin) text += part;
for (const [x, y] of JSON.parse(text)) console.log(String(prove(7, Buffer.from(x, "base64"), BigInt(y))));
"""


def proved(samples: list[tuple[bytes, int]]) -> list[str]:
    """Return the nonce of each payload and label as Node finds it, or 'null'."""
    given = json.dumps([(base64.b64encode(x).decode(), y) for x, y in samples])
    command = [str(NODE), "--input-type=module", "--eval", PROVE % ROOT]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout.split()


def test_node_proves_the_payloads_that_python_makes() -> None:
    """The generator is written once more in Node: sizes that end inside a word, and nonces of any length."""
    made = {nonce: sample(7, nonce % 1000, nonce, size) for nonce in (0, 5, 2**63 + 9, 2**64 - 1) for size in (4096,)}
    made |= {100 + size: sample(7, 3, 100 + size, size) for size in (16, 17, 31, 257)}
    found = proved([(one["x"].tobytes(), one["y"]) for one in made.values()])
    assert found == [str(nonce) for nonce in made]


def test_node_proves_no_damaged_payload() -> None:
    """A sample that was mixed up, cut short or overwritten must not pass for the one that it was."""
    one = sample(7, 3, 11, 64)
    damaged = [one["x"].copy() for _ in range(3)]
    damaged[0][63] ^= 1
    damaged[1][8] ^= 1
    damaged[2] = np.concatenate([one["x"][:40], one["x"][16:40]])
    assert proved([(x.tobytes(), 3) for x in damaged] + [(one["x"].tobytes(), 4)]) == ["null"] * 4
