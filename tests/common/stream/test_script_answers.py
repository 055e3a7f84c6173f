"""Each script that changes hashes alone, case by case: its answer, and all that its keys hold afterwards.

Tests of writers and readers show the usual way through a script. These cases stand at its edges, where a wrong
comparison loses a sample, keeps bytes for ever or lets a dead process speak.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, ms_of
from penstock_common.stream.servers.embedded import EmbeddedServer
from tests.house.lua import LUA_FILES, parse_lua

FIRST_WRITE = "the first write frees"
KEYS = {path.stem: parse_lua(path).headings["KEYS"].replace("..", "").split() for path in LUA_FILES}
FREEING = {path.stem for path in LUA_FILES if FIRST_WRITE in path.read_text()}
Content = dict[str, Any]


@dataclass(frozen=True)
class Now:
    """The server's time in a case, and so many milliseconds more or less."""

    more_ms: int = 0

    def __add__(self, more_ms: int) -> Now:
        return replace(self, more_ms=self.more_ms + more_ms)

    def __sub__(self, less_ms: int) -> Now:
        return self + -less_ms


NOW = Now()
HOUR = 3_600_000


@dataclass(frozen=True)
class Case:
    """One call of a script. Keys have the names of the script's comments."""

    script: str
    claim: str
    before: Content
    arguments: list[Any]
    answer: Any
    after: Content = field(default_factory=dict)
    """The keys that change, with all that they hold. None: the key is gone."""

    @property
    def name(self) -> str:
        """Return the name of the test."""
        return f"{self.script}: {self.claim}"


def manifest(**fields: Any) -> Content:
    """Return a manifest with the id ``m``."""
    return {"id": "m", **{name.replace("_", ":", 1) if name[1] == "_" else name: v for name, v in fields.items()}}


def group(**fields: Any) -> Content:
    """Return a group's record."""
    return {"kind": "shared", "first": 0, "declared": False, "holds": True, "seen": 1, **fields}


REFUSED = ResponseError
GONE_META: list[Content] = [{"id": "other"}, {"id": "s", "deleting": "1"}, {}]
EVENT = ["produced", "7"]

MANIFESTS = [
    Case("begin_manifest", "the first fields stay, all of them",
         {"meta": {"id": "s"}, "manifest": {"id": "first"}, "epochs": {"6": "produced"}},
         ["s", 7, "open", "id", "m", "kind", "feed"], 1,
         {"manifest": {"id": "first", "kind": "feed"}, "epochs": {"6": "produced", "7": "open"}}),
    Case("begin_manifest", "the state of a known epoch stays",
         {"meta": {"id": "s", "released": "1-3,5,9-12"}, "epochs": {"4": "sized"}},
         ["s", 4, "open", "id", "m"], 1, {"manifest": {"id": "m"}}),
    *(Case("begin_manifest", f"epoch {epoch} of a released range is refused",
           {"meta": {"id": "s", "released": "1-3,5"}}, ["s", epoch, "open", "id", "m"], 0) for epoch in (1, 2, 3, 5)),
    *(Case("begin_manifest", f"epoch {epoch} beside a released range is begun",
           {"meta": {"id": "s", "released": "1-3,5"}}, ["s", epoch, "open", "id", "m"], 1,
           {"manifest": {"id": "m"}, "epochs": {str(epoch): "open"}}) for epoch in (0, 4, 6)),
    *(Case("begin_manifest", f"a stream {meta} is gone", {"meta": meta}, ["s", 7, "open", "id", "m"], -1)
      for meta in GONE_META),
    *(Case("fix_spec", f"a stream {meta} is gone", {"meta": meta}, ["s", "new"], -1) for meta in GONE_META),
    Case("fix_spec", "the first spec stays", {"meta": {"id": "s", "spec": "old"}}, ["s", "new"], b"old"),
    Case("fix_spec", "an empty spec is no spec", {"meta": {"id": "s", "spec": ""}}, ["s", "new"], b"new",
         {"meta": {"id": "s", "spec": "new"}}),
    *(Case("set_stream_field", f"a stream {meta} is gone", {"meta": meta}, ["s", "a", "new"], -1)
      for meta in GONE_META),
    Case("set_stream_field", "a field is set", {"meta": {"id": "s"}}, ["s", "a", "new"], 1,
         {"meta": {"id": "s", "a": "new"}}),
    *(Case("reserve_epoch", f"a stream {meta} is gone", {"meta": meta}, ["s", ""], -1) for meta in GONE_META),
    Case("reserve_epoch", "the first number is 0", {"meta": {"id": "s"}}, ["s", ""], 0,
         {"meta": {"id": "s", "next_epoch": "1"}}),
    Case("reserve_epoch", "no number is given twice", {"meta": {"id": "s", "next_epoch": "4"}}, ["s", ""], 4,
         {"meta": {"id": "s", "next_epoch": "5"}}),
    Case("reserve_epoch", "the next number may be named", {"meta": {"id": "s", "next_epoch": "4"}}, ["s", 4], 4,
         {"meta": {"id": "s", "next_epoch": "5"}}),
    Case("reserve_epoch", "a lower number leaves the counter", {"meta": {"id": "s", "next_epoch": "4"}}, ["s", 3], 3),
    Case("reserve_epoch", "a higher number raises the counter above it", {"meta": {"id": "s"}}, ["s", 8], 8,
         {"meta": {"id": "s", "next_epoch": "9"}}),
    Case("reserve_shard", "another manifest is left alone", {"manifest": {"id": "other"}}, ["m", 3], 0),
    Case("reserve_shard", "the first shard", {"manifest": manifest()}, ["m", 0], 1,
         {"manifest": manifest(next_shard="1")}),
    Case("reserve_shard", "the next shard", {"manifest": manifest(next_shard="3")}, ["m", 3], 1,
         {"manifest": manifest(next_shard="4")}),
    Case("reserve_shard", "a lower shard leaves the counter", {"manifest": manifest(next_shard="3")}, ["m", 2], 1),
    Case("forget_manifest", "another manifest is left alone", {"manifest": {"id": "other"}, "epochs": {"7": "open"}},
         ["m", 7], 0),
    Case("forget_manifest", "both keys forget it", {"manifest": manifest(), "epochs": {"6": "open", "7": "open"}},
         ["m", 7], 1, {"manifest": None, "epochs": {"6": "open"}}),
    Case("mark_deleting", "another stream is left alone", {"meta": {"id": "other"}}, ["s", 5], 0),
    Case("mark_deleting", "the mark is set", {"meta": {"id": "s"}}, ["s", 5], 1,
         {"meta": {"id": "s", "deleting": "5"}}),
    Case("close_as_committed", "another manifest is refused", {"manifest": {"id": "other"}}, ["m", 7, 5], REFUSED),
    Case("close_as_committed", "the epoch has the sizes that are committed",
         {"manifest": manifest(state="open", d_0="9"), "epochs": {"7": "open"}}, ["m", 7, 5, 6], 1,
         {"manifest": manifest(d_0="5", d_1="6", shards="2", done="2", sealed="1", state="produced", sizes=[5, 6],
                               produced_ms=NOW), "epochs": {"7": "produced"}, "events": [EVENT]}),
    Case("size_epoch", "another manifest is refused", {"manifest": {"id": "other"}}, ["m", 7, 2, "[5,6]"], REFUSED),
    *(Case("size_epoch", f"an epoch that is {state} stays so", {"manifest": manifest(state=state)},
           ["m", 7, 2, "[5,6]"], state.encode()) for state in ("sized", "produced", "abandoned")),
    Case("size_epoch", "an epoch without finished shards is sized", {"manifest": manifest(state="open")},
         ["m", 7, 2, "[5,6]"], b"sized",
         {"manifest": manifest(state="sized", shards="2", sizes=[5, 6]), "epochs": {"7": "sized"},
          "events": [["sized", "7"]]}),
    Case("size_epoch", "an epoch of one unfinished shard is sized", {"manifest": manifest(state="open")},
         ["m", 7, 1, "[5]"], b"sized",
         {"manifest": manifest(state="sized", shards="1", sizes=[5]), "epochs": {"7": "sized"},
          "events": [["sized", "7"]]}),
    Case("size_epoch", "an epoch whose shards are finished is produced", {"manifest": manifest(state="open", done="2")},
         ["m", 7, 2, "[5,6]"], b"produced",
         {"manifest": manifest(state="produced", done="2", shards="2", sizes=[5, 6], produced_ms=NOW),
          "epochs": {"7": "produced"}, "events": [EVENT]}),
    Case("finish_shard", "another manifest is refused", {"manifest": {"id": "other"}}, ["m", 7, 0, 5], REFUSED),
    Case("finish_shard", "a shard of an open epoch is counted", {"manifest": manifest(state="open", shards="1")},
         ["m", 7, 0, 5], b"open", {"manifest": manifest(state="open", shards="1", d_0="5", done="1")}),
    Case("finish_shard", "a shard counts once", {"manifest": manifest(state="sized", shards="2", d_0="5", done="1")},
         ["m", 7, 0, 6], b"sized"),
    Case("finish_shard", "the last shard makes the epoch produced",
         {"manifest": manifest(state="sized", shards="2", d_0="5", done="1")}, ["m", 7, 1, 6], b"produced",
         {"manifest": manifest(state="produced", shards="2", d_0="5", d_1="6", done="2", produced_ms=NOW),
          "epochs": {"7": "produced"}, "events": [EVENT]}),
    Case("finish_shard", "a key that is no stream does not hold up the epoch",
         {"manifest": manifest(state="sized", shards="1"), "events": {"no": "stream"}}, ["m", 7, 0, 6], b"produced",
         {"manifest": manifest(state="produced", shards="1", d_0="6", done="1", produced_ms=NOW),
          "epochs": {"7": "produced"}}),
    Case("finish_feed_shard", "another manifest is refused", {"manifest": {"id": "other"}}, ["m", 7, 0, 5], REFUSED),
    Case("finish_feed_shard", "an epoch with another writer stays open",
         {"manifest": manifest(state="open", next_shard="2")}, ["m", 7, 0, 5], 0,
         {"manifest": manifest(state="open", next_shard="2", sealed="1", d_0="5", done="1")}),
    Case("finish_feed_shard", "the last writer sizes the epoch",
         {"manifest": manifest(state="open", next_shard="2", d_0="5", done="1")}, ["m", 7, 1, 6], 1,
         {"manifest": manifest(state="produced", next_shard="2", sealed="1", d_0="5", d_1="6", done="2", shards="2",
                               sizes=[5, 6], produced_ms=NOW), "epochs": {"7": "produced"}, "events": [EVENT]}),
    Case("finish_feed_shard", "a produced epoch is not produced again",
         {"manifest": manifest(state="produced", sealed="1", next_shard="1", d_0="5", done="1")}, ["m", 7, 0, 9], 0),
    Case("take_shard", "a token keeps its shard", {"manifest": manifest(w_a="3", state="produced")}, ["a"], 3),
    Case("take_shard", "the first shard is 0", {"manifest": manifest(state="open")}, ["a"], 0,
         {"manifest": manifest(state="open", next_shard="1", w_a="0")}),
    Case("take_shard", "no shard is taken twice", {"manifest": manifest(state="open", next_shard="4")}, ["a"], 4,
         {"manifest": manifest(state="open", next_shard="5", w_a="4")}),
    Case("take_shard", "a sealed epoch gives none", {"manifest": manifest(state="open", sealed="1")}, ["a"], -1),
    Case("take_shard", "a produced epoch gives none", {"manifest": manifest(state="produced")}, ["a"], -1),
    Case("retake_shard", "another manifest is left alone", {"manifest": {"id": "other", "state": "open"}},
         ["m", "a", 3], 0),
    Case("retake_shard", "what is known stays", {"manifest": manifest(state="produced", w_a="3")}, ["m", "a", 3], 1),
    Case("retake_shard", "an epoch that went on without it refuses it", {"manifest": manifest(state="produced")},
         ["m", "a", 3], 0),
    Case("retake_shard", "the first shard", {"manifest": manifest(state="open")}, ["m", "a", 0], 1,
         {"manifest": manifest(state="open", w_a="0", next_shard="1")}),
    Case("retake_shard", "the next shard", {"manifest": manifest(state="open", next_shard="3")}, ["m", "a", 3], 1,
         {"manifest": manifest(state="open", w_a="3", next_shard="4")}),
    Case("retake_shard", "a lower shard leaves the counter", {"manifest": manifest(state="open", next_shard="4")},
         ["m", "a", 3], 1, {"manifest": manifest(state="open", w_a="3", next_shard="4")}),
    *(Case("take_files", f"a stream {meta} is gone", {"meta": meta}, ["s", 2, "a", "1"], -1) for meta in GONE_META),
    Case("take_files", "an epoch that has its files keeps them", {"meta": {"id": "s"}, "watched": {"due:2": "1"}},
         ["s", 2, "a", "1"], 1),
    Case("take_files", "one file of another epoch refuses all", {"meta": {"id": "s"}, "watched": {"f:b": "1"}},
         ["s", 2, "a", "1", "b", "2"], 0),
    Case("take_files", "the first file of another epoch refuses all", {"meta": {"id": "s"}, "watched": {"f:a": "1"}},
         ["s", 2, "a", "1", "b", "2"], 0),
    Case("take_files", "all files are taken", {"meta": {"id": "s"}}, ["s", 2, "a", "v", "b", "w"], 1,
         {"watched": {"due:2": "2", "f:a": "v", "f:b": "w"}}),
    Case("note_loss", "another id is left alone", {"hash": {"id": "other"}}, ["m", 2, "lost:a", "x"], 0),
    Case("note_loss", "the first note stays", {"hash": {"id": "m", "lost:a": "x"}}, ["m", 1, "lost:a", "y"], 1),
    Case("note_loss", "as many notes as are allowed", {"hash": {"id": "m", "lost:a": "x", "other": "1"}},
         ["m", 2, "lost:b", "y"], 1, {"hash": {"id": "m", "lost:a": "x", "other": "1", "lost:b": "y"}}),
    Case("note_loss", "no note more", {"hash": {"id": "m", "lost:a": "x", "lost:b": "y"}}, ["m", 2, "lost:c", "z"], -1),
]  # fmt: skip

ROSTERS = [
    Case("close_epoch_for_group", "an unknown group closes nothing", {"roster": {"gen": "1"}}, ["g", 3], 0),
    Case("close_epoch_for_group", "a note is new once", {"roster": {"g:g": group(), "d:g:3": "1"}}, ["g", 3], 0),
    Case("close_epoch_for_group", "a group closes an epoch", {"roster": {"g:g": group()}}, ["g", 3], 1,
         {"roster": {"g:g": group(), "d:g:3": "1"}}),
    Case("reopen_epoch_for_group", "a known group and epoch", {"roster": {"g:g": group(), "e:3": "m", "d:g:3": "1"}},
         ["g", 3], 1, {"roster": {"g:g": group(), "e:3": "m", "gen": "1"}}),
    Case("reopen_epoch_for_group", "an unknown epoch", {"roster": {"g:g": group(), "d:g:3": "1"}}, ["g", 3], 0),
    Case("reopen_epoch_for_group", "an unknown group", {"roster": {"e:3": "m", "d:g:3": "1"}}, ["g", 3], 0),
    Case("correct_bytes", "a count that moved is left", {"roster": {"b:3": "7", "bytes": "9"}}, [3, 6, 5], 0),
    Case("correct_bytes", "both counts fall", {"roster": {"b:3": "7", "bytes": "9"}}, [3, 7, 5], 1,
         {"roster": {"b:3": "5", "bytes": "7"}}),
    Case("correct_bytes", "a missing count is 0", {"roster": {"bytes": "9"}}, [3, 0, 5], 1,
         {"roster": {"b:3": "5", "bytes": "14"}}),
    Case("drop_group", "an unknown group leaves others", {"roster": {"g:gg": group(), "m:gg:x": "1", "gen": "4"}},
         ["g"], 0),
    Case("drop_group", "all fields of the group are removed, and no other's",
         {"roster": {"g:g": group(), "m:g:x": "1", "o:g:x": "1", "d:g:3": "1", "r:g:3": "1", "m:gg:x": "1",
                     "gen": "4"}}, ["g"], 1, {"roster": {"m:gg:x": "1", "r:g:3": "1", "gen": "5"}}),
    Case("lease_replay", "an epoch that is gone", {"roster": {"gen": "1"}}, ["t", 3, HOUR, 0], 0),
    Case("lease_replay", "a new lease raises the generation", {"roster": {"e:3": "m", "gen": "1"}},
         ["t", 3, HOUR, 0], 1, {"roster": {"e:3": "m", "gen": "2", "r:t": {"epoch": 3, "till": NOW + HOUR}}}),
    Case("lease_replay", "a lease is renewed",
         {"roster": {"e:3": "m", "gen": "1", "r:t": {"epoch": 3, "till": NOW + HOUR}}}, ["t", 3, 2 * HOUR, 1], 1,
         {"roster": {"e:3": "m", "gen": "1", "r:t": {"epoch": 3, "till": NOW + 2 * HOUR}}}),
    Case("lease_replay", "a lease that is taken again leaves the generation",
         {"roster": {"e:3": "m", "gen": "1", "r:t": {"epoch": 3, "till": NOW - HOUR}}}, ["t", 3, HOUR, 0], 1,
         {"roster": {"e:3": "m", "gen": "1", "r:t": {"epoch": 3, "till": NOW + HOUR}}}),
    Case("lease_replay", "a lapsed lease is not renewed",
         {"roster": {"e:3": "m", "r:t": {"epoch": 3, "till": NOW - HOUR}}}, ["t", 3, HOUR, 1], 0),
    Case("lease_replay", "a lost lease is not renewed", {"roster": {"e:3": "m"}}, ["t", 3, HOUR, 1], 0),
    Case("note_wait", "an epoch that is gone", {"roster": {"gen": "1"}}, [3, 2, 500, 10, 20, "budget", 1], 0),
    Case("note_wait", "a wait of the next shard", {"roster": {"e:3": "m"}}, [3, 2, 500, 10, 20, "budget", 1], NOW - 500,
         {"roster": {"e:3": "m", "w:3:2": {"since": NOW - 500, "seen": NOW, "need": 10, "held": 20, "why": "budget",
                                           "next": True}}}),
    Case("note_wait", "a wait of a later shard", {"roster": {"e:3": "m"}}, [3, 2, 0, 10, 20, "budget", 0], NOW,
         {"roster": {"e:3": "m", "w:3:2": {"since": NOW, "seen": NOW, "need": 10, "held": 20, "why": "budget",
                                           "next": False}}}),
    Case("pin_epoch", "an epoch that is gone", {"roster": {"gen": "1"}}, [3], b"gone"),
    Case("pin_epoch", "an epoch without all its entries", {"roster": {"e:3": "m", "t:3": "1"}}, [3], b"trimmed"),
    Case("pin_epoch", "a pin stays as it is", {"roster": {"e:3": "m", "p:3": "5", "gen": "1"}}, [3], b"known"),
    Case("pin_epoch", "a new pin raises the generation", {"roster": {"e:3": "m", "gen": "1"}}, [3], b"pinned",
         {"roster": {"e:3": "m", "p:3": NOW, "gen": "2"}}),
    *(Case("report_rate", f"a stream {meta} is gone", {"meta": meta}, ["s", "w", {"rate": 2}, 0], 0)
      for meta in GONE_META),
    Case("report_rate", "old reports stay without a sweep", {"meta": {"id": "s"}, "paces": {"old": {"seen": 1}}},
         ["s", "w", {"rate": 2}, 0], 1, {"paces": {"old": {"seen": 1}, "w": {"rate": 2, "seen": NOW}}}),
    Case("report_rate", "a sweep removes old reports alone",
         {"meta": {"id": "s"}, "paces": {"old": {"seen": NOW - 2 * HOUR}, "new": {"seen": NOW - HOUR // 2}}},
         ["s", "w", {"rate": 2}, HOUR], 1,
         {"paces": {"new": {"seen": NOW - HOUR // 2}, "w": {"rate": 2, "seen": NOW}}}),
    Case("report_rate", "a sweep of one millisecond is a sweep", {"meta": {"id": "s"}, "paces": {"old": {"seen": 1}}},
         ["s", "w", {"rate": 2}, 1], 1, {"paces": {"w": {"rate": 2, "seen": NOW}}}),
    Case("expire_silent", "what is silent goes, and what was seen stays",
         {"roster": {
             "m:g:old": {"inc": "i", "seen": NOW - 2 * HOUR}, "m:g:new": {"inc": "i", "seen": NOW - HOUR // 2},
             "o:g:old": {"inc": "i", "seen": NOW - 2 * HOUR}, "o:g:new": {"inc": "i", "seen": NOW - HOUR // 2},
             "r:old": {"epoch": 1, "till": NOW - 2 * HOUR}, "r:new": {"epoch": 1, "till": NOW - HOUR // 2},
             "w:1:0": {"seen": NOW - 2 * HOUR}, "w:1:1": {"seen": NOW - HOUR // 2},
             "g:old": group(seen=NOW - 2 * HOUR), "g:new": group(seen=NOW - HOUR // 2),
             "g:declared": group(seen=NOW - 2 * HOUR, declared=True), "g:away": group(seen=1, holds=False)}},
         [HOUR, HOUR, 0], [b"old"],
         {"roster": {
             "m:g:new": {"inc": "i", "seen": NOW - HOUR // 2}, "o:g:new": {"inc": "i", "seen": NOW - HOUR // 2},
             "r:new": {"epoch": 1, "till": NOW - HOUR // 2}, "w:1:1": {"seen": NOW - HOUR // 2},
             "g:old": group(seen=NOW - 2 * HOUR, holds=False), "g:new": group(seen=NOW - HOUR // 2),
             "g:declared": group(seen=NOW - 2 * HOUR, declared=True), "g:away": group(seen=1, holds=False)}}),
    Case("expire_silent", "a second look spares what has changed since the first",
         {"roster": {"m:g:a": {"inc": "i", "seen": 1}, "m:g:b": {"inc": "i", "seen": 2},
                     "o:g:a": {"inc": "i", "seen": 2}, "r:a": {"epoch": 1, "till": 2}, "g:g": group(seen=2),
                     "w:1:0": {"seen": 1}}},
         [HOUR, HOUR, 1, "m:g:a", '{"inc": "i", "seen": 1}', "m:g:b", '{"inc": "i", "seen": 1}'], [],
         {"roster": {"m:g:b": {"inc": "i", "seen": 2}, "o:g:a": {"inc": "i", "seen": 2}, "r:a": {"epoch": 1, "till": 2},
                     "g:g": group(seen=2)}}),
    Case("touch_partition", "nothing is made where there is no roster", {}, [], 0),
    Case("touch_partition", "the bytes stay", {"roster": {"bytes": "7"}}, [], 1),
    Case("free_segments", "sealed segments without entries are freed",
         {"segments": {"a": "0", "s:a": "1", "b": "1", "s:b": "1", "c": "0", "s:d": "2", "s:e": "1", "f": "0",
                       "s:f": "2"}},
         ["a", "b", "c", "d", "e", "f"], [b"a", b"d", b"f"],
         {"segments": {"b": "1", "s:b": "1", "c": "0", "s:d": "2", "s:e": "1", "s:f": "2"}}),
    *(Case("seal_segments", f"an epoch that is {state} seals nothing", {"state": state, "segments": {"a": "1"}},
           ["m", 1, "a"], 0) for state in ("gone:m", "live:other", "abandoned:other")),
    *(Case("seal_segments", f"a writer seals what it used while the epoch is {state}",
           {"state": state, "segments": {"a": "1"}}, ["m", 1, "b", "a"], 1, {"segments": {"a": "1", "s:a": "1"}})
      for state in ("live:m", "abandoned:m")),
    Case("seal_segments", "others seal also what is unused", {"state": "live:m", "segments": {"a": "1"}},
         ["m", 2, "a", "b"], 1, {"segments": {"a": "1", "s:a": "2", "s:b": "2"}}),
]  # fmt: skip


def ordered(**fields: Any) -> Content:
    """Return the roster of an ordered group ``o`` of two ranks, with rank 1."""
    record = group(kind="ordered", world=2, first=3)
    return {"g:o": record, "m:o:rank-1": {"inc": "i", "seen": 1}, **fields}


RANK = ["live:m", "o", 1, "i"]
NOT_LIVE = ("live:other", "gone:m", "abandoned:m", None)
POSITIONS = [
    *(Case("report_position", f"a state {state} ends the reports",
           {"roster": ordered(), **({"state": state} if state else {})}, [*RANK, 5], -1) for state in NOT_LIVE),
    Case("report_position", "a damaged state is named", {"roster": ordered(), "state": "zzz"}, [*RANK, 5],
         ResponseError('PENSTOCK damaged state "zzz"')),
    Case("report_position", "a position rises", {"roster": ordered(), "state": "live:m", "positions": {"1": "4"}},
         [*RANK, 5], 1, {"positions": {"1": "5"}}),
    Case("report_position", "a position stays", {"roster": ordered(), "state": "live:m", "positions": {"1": "5"}},
         [*RANK, 5], 0),
    Case("report_position", "the first report is above 0", {"roster": ordered(), "state": "live:m"}, [*RANK, 1], 1,
         {"positions": {"1": "1"}}),
    Case("report_position", "the floor counts where a rank has no position",
         {"roster": ordered(), "state": "live:m", "positions": {"floor": "5"}}, [*RANK, 5], 0),
    Case("report_position", "a position counts before the floor",
         {"roster": ordered(), "state": "live:m", "positions": {"floor": "9", "1": "4"}}, [*RANK, 5], 1,
         {"positions": {"floor": "9", "1": "5"}}),
    *(Case(script, "a group that is gone is named", {"roster": {"gen": "1"}, "state": "live:m"}, [*RANK, *more],
           ResponseError("PENSTOCK gone"))
      for script, more in (("report_position", [5]), ("rewind_position", [7, 2, 0, -1]))),
    *(Case(script, "a rank beyond the last is named", {"roster": ordered(), "state": "live:m"},
           ["live:m", "o", 2, "i", *more], ResponseError("PENSTOCK rank 2"))
      for script, more in (("report_position", [5]), ("rewind_position", [7, 2, 0, -1]))),
    *(Case(script, "a group without ranks is named", {"roster": {"g:o": group()}, "state": "live:m"},
           ["live:m", "o", 0, "i", *more], ResponseError("PENSTOCK rank 0"))
      for script, more in (("report_position", [5]), ("rewind_position", [7, 2, 0, -1]))),
    *(Case(script, f"a rank of {member} is replaced", {"roster": {**ordered(), **member}, "state": "live:m"},
           ["live:m", "o", rank, "i", *more], ResponseError("PENSTOCK replaced"))
      for script, more in (("report_position", [5]), ("rewind_position", [7, 2, 0, -1]))
      for rank, member in ((0, {}), (1, {"m:o:rank-1": {"inc": "j", "seen": 1}}))),
    *(Case(script, f"a damaged {name} of {text} is named", {"roster": {**ordered(), name: text}, "state": "live:m"},
           [*RANK, *more], ResponseError(f"Expected an object{what}, found {text}"))
      for script, more in (("report_position", [5]), ("rewind_position", [7, 2, 0, -1]))
      for name, text, what in (("g:o", '"text"', ""), ("m:o:rank-1", '"text"', ""),
                               ("m:o:rank-1", '{"inc":3}', " with inc"))),
    Case("rewind_position", "an epoch that is gone", {"roster": ordered(), "state": "gone:m"}, [*RANK, 7, 2, 0, -1],
         [b"gone", 0]),
    Case("rewind_position", "the first partition has the positions",
         {"roster": ordered(**{"d:o:7": "1", "gen": "1"}), "state": "live:m", "positions": {"0": "6", "1": "4"}},
         [*RANK, 7, 2, 0, -1], [b"ok", 4], {"roster": ordered(gen="2"), "positions": {"0": "6", "1": "2"}}),
    Case("rewind_position", "a rank without a position has the floor",
         {"roster": ordered(), "state": "live:m", "positions": {"floor": "3", "1": "4"}},
         [*RANK, 7, 2, 0, -1], [b"ok", 3], {"roster": ordered(gen="1"), "positions": {"floor": "3", "1": "2"}}),
    Case("rewind_position", "the last rank may be the lowest", {"roster": ordered(), "state": "live:m",
                                                                "positions": {"0": "4", "1": "3", "2": "1"}},
         [*RANK, 7, 2, 0, -1], [b"ok", 3], {"roster": ordered(gen="1"), "positions": {"0": "4", "1": "2", "2": "1"}}),
    Case("rewind_position", "without positions nothing is acknowledged", {"roster": ordered(), "state": "live:m"},
         [*RANK, 7, 2, 0, -1], [b"ok", 0], {"roster": ordered(gen="1"), "positions": {"1": "2"}}),
    Case("rewind_position", "another partition is told, and keeps no position",
         {"roster": ordered(**{"d:o:7": "1"}), "state": "live:m"}, [*RANK, 7, 2, 0, 0], [b"ok", 0],
         {"roster": ordered(gen="1")}),
    Case("rewind_position", "a look changes nothing but the generation",
         {"roster": ordered(**{"d:o:2": "1"}), "state": "live:m", "positions": {"1": "4"}}, [*RANK, 2, 2, 1, 4],
         [b"ok", 4], {"roster": ordered(**{"d:o:2": "1", "gen": "1"})}),
    Case("rewind_position", "entries below the acknowledged may be removed",
         {"roster": ordered(**{"t:7": "1"}), "state": "live:m"}, [*RANK, 7, 3, 0, 4], [b"trimmed", 4]),
    Case("rewind_position", "entries above the acknowledged are there",
         {"roster": ordered(**{"t:7": "1"}), "state": "live:m"}, [*RANK, 7, 4, 0, 4], [b"ok", 4],
         {"roster": ordered(**{"t:7": "1", "gen": "1"})}),
    Case("rewind_position", "the group begins at an earlier epoch", {"roster": ordered(), "state": "live:m"},
         [*RANK, 2, 4, 0, 4], [b"ok", 4],
         {"roster": {**ordered(gen="1"), "g:o": group(kind="ordered", world=2, first=2)}}),
]  # fmt: skip

CASES = {case.name: case for case in [*MANIFESTS, *ROSTERS, *POSITIONS]}


class Server:
    """A server with the keys of one case."""

    def __init__(self, client: Client, case: Case) -> None:
        self.client, self.case = client, case
        self.now = ms_of(client.time())
        client.flushall()
        for name, content in case.before.items():
            if isinstance(content, dict) and content:
                client.hset(name, mapping={key: self._text(value) for key, value in content.items()})
            elif isinstance(content, str):
                client.set(name, content)

    def run(self) -> tuple[Any, int]:
        """Run the script. Return its answer or error, and the time after it."""
        arguments = [json.dumps(one) if isinstance(one, dict) else one for one in self.case.arguments]
        try:
            keys = KEYS[self.case.script]
            answer = self.client.eval(load_script(self.case.script), len(keys), *keys, *arguments)
        except ResponseError as error:
            answer = error
        return answer, ms_of(self.client.time())

    def content(self) -> Content:
        """Return what every key holds. Text that is JSON is decoded."""
        found: Content = {}
        for key in self.client.scan_iter():
            name, kind = key.decode(), self.client.type(key)
            if kind == b"hash":
                fields = self.client.hgetall(key).items()
                found[name] = {field.decode(): _decoded(value.decode()) for field, value in fields}
            elif kind == b"string":
                found[name] = self.client.get(key).decode()
            else:
                found[name] = [
                    [x.decode() for pair in fields.items() for x in pair] for _, fields in self._entries(key)
                ]
        return found

    def matches(self, found: Any, expected: Any, after_ms: int) -> bool:
        """Return whether a value is the expected one, of which times lie between the begin and the end of the case."""
        if isinstance(expected, Now):
            low = self.now + expected.more_ms
            return low <= int(found) <= low + after_ms - self.now
        if isinstance(expected, dict):
            same = found.keys() == expected.keys()
            return same and all(self.matches(found[key], value, after_ms) for key, value in expected.items())
        return bool(found == (_decoded(expected) if isinstance(expected, str) else expected))

    def _entries(self, key: bytes) -> Any:
        return self.client.xrange(key)

    def _text(self, value: Any) -> Any:
        if isinstance(value, dict):
            return json.dumps({key: self._number(one) for key, one in value.items()})
        return value if isinstance(value, str) else json.dumps(self._number(value))

    def _number(self, value: Any) -> Any:
        return self.now + value.more_ms if isinstance(value, Now) else value


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def check(client: Client, case: Case, kind: type[Server] = Server) -> None:
    """Run a case, and compare the answer and every key."""
    server = kind(client, case)
    before = server.content()
    answer, after_ms = server.run()
    found = server.content()
    if isinstance(case.answer, type):
        assert isinstance(answer, case.answer)
    elif isinstance(case.answer, ResponseError):
        assert str(case.answer) in str(answer)
    else:
        assert server.matches(answer, case.answer, after_ms), answer
    expected = {name: content for name, content in {**before, **case.after}.items() if content is not None}
    assert server.matches(found, expected, after_ms), found


@pytest.mark.parametrize("name", CASES)
def test_a_script_answers_and_stores_what_its_case_says(any_client: redis.Redis, name: str) -> None:
    """Each case is a promise to a caller in another process."""
    check(any_client, CASES[name])


class FullServer(Server):
    """A server that is full while the script runs."""

    def run(self) -> tuple[Any, int]:
        """Run the script at a memory limit that everything exceeds."""
        self.client.config_set("maxmemory", "1")
        try:
            return super().run()
        finally:
            self.client.config_set("maxmemory", "0")


@pytest.fixture(scope="module")
def own_client() -> Iterator[Client]:
    """Yield a client of a server of this module, whose memory limit a test may change."""
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        yield client


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.script in FREEING])
def test_a_script_that_frees_first_does_the_same_at_maxmemory(own_client: Client, name: str) -> None:
    """Acknowledging, leaving and releasing free memory, so that a full server is the last place to refuse them."""
    check(own_client, CASES[name], FullServer)
