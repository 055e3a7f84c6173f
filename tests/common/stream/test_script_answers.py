"""Each script, case by case: its answer, and all that its keys hold afterwards.

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

KEYS = {
    path.stem: parse_lua(path).headings["KEYS"].replace("..", "").translate({91: "", 93: ""}).split()
    for path in LUA_FILES
}
FREEING = {path.stem for path in LUA_FILES if "maxmemory" in path.read_text()} - {"commit"} | {"dead_letter"}
Content = dict[str, Any]


@dataclass(frozen=True)
class Now:
    """The server's time in a case, plus ``more_ms``."""

    more_ms: int = 0

    def __add__(self, more_ms: int) -> Now:
        return replace(self, more_ms=self.more_ms + more_ms)

    def __sub__(self, less_ms: int) -> Now:
        return self + -less_ms


NOW = Now()
HOUR = 3_600_000


@dataclass(frozen=True)
class Log:
    """A Redis stream: the fields of each entry, and what each group was given.

    A group is its last delivered id, and the member and number of deliveries of each pending entry. All of them are
    idle for a minute before a case. A third value True says that a member has just claimed it.
    """

    entries: dict[str, list[str]]
    groups: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = field(default_factory=dict)


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
    keys: list[str] | None = None
    """The keys of a script that takes any number."""

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

UNREPLICATED = "unreplicated:3"

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
    *(Case("begin_next_epoch", f"a stream {meta} is gone", {"meta": meta}, ["s", 0, "m", "open"], -1)
      for meta in GONE_META),
    Case("begin_next_epoch", "the first number is 0", {"meta": {"id": "s"}}, ["s", 0, "m", "open", "kind", "feed"], 1,
         {"meta": {"id": "s", "next_epoch": "1"}, "manifest": {"id": "m", "kind": "feed"}, "epochs": {"0": "open"}}),
    Case("begin_next_epoch", "the next number is taken", {"meta": {"id": "s", "next_epoch": "9"}},
         ["s", 9, "m", "open", "kind", "feed"], 1,
         {"meta": {"id": "s", "next_epoch": "10"}, "manifest": {"id": "m", "kind": "feed"}, "epochs": {"9": "open"}}),
    *(Case("begin_next_epoch", f"epoch {epoch} is not the next one", {"meta": {"id": "s", "next_epoch": "9"}},
           ["s", epoch, "m", "open"], 0) for epoch in (8, 10)),
    Case("begin_next_epoch", "a repeated call finds its own epoch",
         {"meta": {"id": "s", "next_epoch": "9"}, "manifest": {"id": "m"}}, ["s", 8, "m", "open"], 1),
    Case("begin_next_epoch", "a number in use is passed over",
         {"meta": {"id": "s", "next_epoch": "9"}, "manifest": {"id": "other"}}, ["s", 9, "m", "open"], 0,
         {"meta": {"id": "s", "next_epoch": "10"}}),
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
    Case("reserve_shard", "a lower shard leaves the counter", {"manifest": manifest(next_shard="9")}, ["m", 2], 1),
    *(Case("abandon_manifest", f"{what} is left alone", {"manifest": found, "meta": {"id": "s"}}, ["m", 7, "s"], 0)
      for what, found in (("another manifest", {"id": "other"}), ("a released epoch", None))),
    Case("abandon_manifest", "another stream is left alone", {"manifest": manifest(), "meta": {"id": "other"}},
         ["m", 7, "s"], 0),
    Case("abandon_manifest", "both keys note it",
         {"manifest": manifest(state="sized"), "epochs": {"7": "sized"}, "meta": {"id": "s"}}, ["m", 7, "s"], 1,
         {"manifest": manifest(state="abandoned"), "epochs": {"7": "abandoned"}}),
    Case("abandon_state", "the state of a released epoch stays away", {}, ["m"], 0),
    Case("abandon_state", "the state is noted", {"state": "live:m"}, ["m"], 1, {"state": "abandoned:m"}),
    Case("forget_manifest", "another manifest is left alone", {"manifest": {"id": "other"}, "epochs": {"7": "open"}},
         ["m", 7], 0),
    Case("forget_manifest", "both keys forget it", {"manifest": manifest(), "epochs": {"6": "open", "7": "open"}},
         ["m", 7], 1, {"manifest": None, "epochs": {"6": "open"}}),
    Case("mark_deleting", "another stream is left alone", {"meta": {"id": "other"}}, ["s", 5], 0),
    Case("mark_deleting", "the mark is set", {"meta": {"id": "s"}}, ["s", 5], 1,
         {"meta": {"id": "s", "deleting": "5"}}),
    Case("note_released", "another stream is left alone", {"meta": {"id": "other"}}, ["s", "", "0-0"], -1),
    Case("note_released", "no stream comes back", {}, ["s", "", "0-0"], -1),
    Case("note_released", "what another process noted since stays", {"meta": {"id": "s", "released": "0-1"}},
         ["s", "0-0", "0-0,2-2"], 0),
    Case("note_released", "the first epoch", {"meta": {"id": "s"}}, ["s", "", "0-0"], 1,
         {"meta": {"id": "s", "released": "0-0"}}),
    Case("note_released", "a later epoch", {"meta": {"id": "s", "released": "0-0"}}, ["s", "0-0", "0-1"], 1,
         {"meta": {"id": "s", "released": "0-1"}}),
    *(Case("close_as_committed", f"{what} is refused", {"manifest": {"id": its}, "meta": {"id": "s"}},
           ["m", 7, of, 5], REFUSED)
      for what, its, of in (("another manifest", "other", "s"), ("another stream's", "m", "t"))),
    Case("close_as_committed", "the epoch has the sizes that are committed",
         {"manifest": manifest(state="open", d_0="9"), "epochs": {"7": "open"}, "meta": {"id": "s"}},
         ["m", 7, "s", 5, 6], 1,
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
         ["m", 7, 0, 5], b"sized"),
    *(Case(name, "a shard that an operator closed before its end", {
          "manifest": manifest(state="produced", shards="1", d_0="5", done="1", sealed="1")}, ["m", 7, 0, 6], REFUSED)
      for name in ("finish_shard", "finish_feed_shard")),
    Case("finish_shard", "the last shard makes the epoch produced",
         {"manifest": manifest(state="sized", shards="2", d_0="5", done="1")}, ["m", 7, 1, 6], b"produced",
         {"manifest": manifest(state="produced", shards="2", d_0="5", d_1="6", done="2", produced_ms=NOW),
          "epochs": {"7": "produced"}, "events": [EVENT]}),
    Case("finish_shard", "a key that is no stream does not hold up the epoch",
         {"manifest": manifest(state="sized", shards="1"), "events": {"no": "stream"}}, ["m", 7, 0, 6], b"produced",
         {"manifest": manifest(state="produced", shards="1", d_0="6", done="1", produced_ms=NOW),
          "epochs": {"7": "produced"}}),
    Case("reopen_shard", "another manifest is left alone", {"manifest": {"id": "other", "state": "sized", "d:1": "6"}},
         ["m", 7, 1], 0),
    *(Case("reopen_shard", f"a shard of an epoch that is {state} stays", {"manifest": manifest(state=state, d_1="6")},
           ["m", 7, 1], 0) for state in ("open", "abandoned")),
    Case("reopen_shard", "a shard that is not finished", {"manifest": manifest(state="sized", d_0="6", done="1")},
         ["m", 7, 1], 0),
    *(Case("reopen_shard", f"a shard of an epoch that is {state} is not finished",
           {"manifest": manifest(state=state, d_0="6", d_1="6", done="2", produced_ms="5"), "epochs": {"7": state}},
           ["m", 7, 1], 1,
           {"manifest": manifest(state="sized", d_0="6", done="1"), "epochs": {"7": "sized"},
            "events": [["sized", "7"]]}) for state in ("sized", "produced")),
    Case("finish_feed_shard", "another manifest is refused", {"manifest": {"id": "other"}}, ["m", 7, 0, 5], REFUSED),
    Case("finish_feed_shard", "an epoch with another writer stays open",
         {"manifest": manifest(state="open", next_shard="2")}, ["m", 7, 0, 5], 0,
         {"manifest": manifest(state="open", next_shard="2", sealed="1", d_0="5", done="1")}),
    Case("finish_feed_shard", "the last writer sizes the epoch",
         {"manifest": manifest(state="open", next_shard="2", d_0="5", done="1")}, ["m", 7, 1, 6], 1,
         {"manifest": manifest(state="produced", next_shard="2", sealed="1", d_0="5", d_1="6", done="2", shards="2",
                               sizes=[5, 6], produced_ms=NOW), "epochs": {"7": "produced"}, "events": [EVENT]}),
    Case("finish_feed_shard", "a produced epoch is not produced again",
         {"manifest": manifest(state="produced", sealed="1", next_shard="1", d_0="5", done="1")}, ["m", 7, 0, 5], 0),
    Case("finish_feed_shard", "a shard that the server forgot is taken again", {"manifest": manifest(state="open")},
         ["m", 7, 0, 5], 1,
         {"manifest": manifest(state="produced", next_shard="1", sealed="1", d_0="5", done="1", shards="1", sizes=[5],
                               produced_ms=NOW), "epochs": {"7": "produced"}, "events": [EVENT]}),
    Case("finish_feed_shard", "a shard before one that the server forgot keeps the epoch open",
         {"manifest": manifest(state="open", next_shard="1", d_0="5", done="1")}, ["m", 7, 2, 6], 0,
         {"manifest": manifest(state="open", next_shard="3", sealed="1", d_0="5", d_2="6", done="2")}),
    Case("finish_feed_shard", "a shard without a size keeps the epoch open",
         {"manifest": manifest(state="open", next_shard="2", done="5")}, ["m", 7, 0, 5], 0,
         {"manifest": manifest(state="open", next_shard="2", sealed="1", d_0="5", done="6")}),
    *(Case(script, f"entries without a replica, after {before}",
           {"manifest": {**manifest(state="open", next_shard="9"), **({UNREPLICATED: before} if before else {})}},
           ["m", 7, 0, 5, 3, 100, 200, "new"], answer,
           {"manifest": {**manifest(state="open", next_shard="9", d_0="5", done="1", **sealed), UNREPLICATED: after}})
      for script, answer, sealed in (("finish_shard", b"open", {}), ("finish_feed_shard", 0, {"sealed": "1"}))
      for before, after in (("", "100 200 new"), ("150 160 old", "100 200 new"), ("50 300 old", "50 300 new"))),
    Case("take_shard", "a token keeps its shard", {"manifest": manifest(w_a="3", state="produced")}, ["a", "m"], 3),
    Case("take_shard", "the first shard is 0", {"manifest": manifest(state="open")}, ["a", "m"], 0,
         {"manifest": manifest(state="open", next_shard="1", w_a="0")}),
    Case("take_shard", "no shard is taken twice", {"manifest": manifest(state="open", next_shard="4")}, ["a", "m"], 4,
         {"manifest": manifest(state="open", next_shard="5", w_a="4")}),
    Case("take_shard", "a sealed epoch gives none", {"manifest": manifest(state="open", sealed="1")}, ["a", "m"], -1),
    Case("take_shard", "another manifest gives none", {"manifest": {"id": "other", "state": "open"}}, ["a", "m"], -1),
    Case("take_shard", "a produced epoch gives none", {"manifest": manifest(state="produced")}, ["a", "m"], -1),
    Case("retake_shard", "another manifest is left alone", {"manifest": {"id": "other", "state": "open"}},
         ["m", "a", 3], 0),
    Case("retake_shard", "what is known stays", {"manifest": manifest(state="produced", w_a="3")}, ["m", "a", 3], 1),
    Case("retake_shard", "an epoch that went on without it refuses it", {"manifest": manifest(state="produced")},
         ["m", "a", 3], 0),
    Case("retake_shard", "the first shard", {"manifest": manifest(state="open")}, ["m", "a", 0], 1,
         {"manifest": manifest(state="open", w_a="0", next_shard="1")}),
    Case("retake_shard", "the next shard", {"manifest": manifest(state="open", next_shard="3")}, ["m", "a", 3], 1,
         {"manifest": manifest(state="open", w_a="3", next_shard="4")}),
    Case("retake_shard", "a lower shard leaves the counter", {"manifest": manifest(state="open", next_shard="9")},
         ["m", "a", 3], 1, {"manifest": manifest(state="open", w_a="3", next_shard="9")}),
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
    Case("note_loss", "notes of another kind do not count", {"hash": {"id": "m", "lost:a": "x"}},
         ["m", 1, "gone:a", "y"], 1, {"hash": {"id": "m", "lost:a": "x", "gone:a": "y"}}),
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
    Case("drop_group", "its Redis groups go with it", {"roster": {"g:g": group()}, "e": Log({}, {"g": ("0-0", {})}),
                                                       "f": Log({}, {"g": ("0-0", {}), "h": ("0-0", {})})}, ["g"], 1,
         {"roster": {"gen": "1"}, "e": Log({}), "f": Log({}, {"h": ("0-0", {})})}, ["roster", "e", "gone", "f"]),
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
    Case("expire_silent", "a group alone is silent", {"roster": {"g:old": group()}}, [HOUR, HOUR, 0], [b"old"],
         {"roster": {"g:old": group(holds=False)}}),
    Case("expire_silent", "every millisecond counts",
         {"roster": {"x": "1", "m:g:a": {"inc": "i", "seen": NOW - 5}, "w:1:0": {"seen": NOW - 5}}}, [0, 0, 0], [],
         {"roster": {"x": "1"}}),
    Case("expire_silent", "a second look spares what has changed since the first",
         {"roster": {"m:g:a": {"inc": "i", "seen": 1}, "m:g:b": {"inc": "i", "seen": 2},
                     "o:g:a": {"inc": "i", "seen": 2}, "r:a": {"epoch": 1, "till": 2}, "g:g": group(seen=2),
                     "w:1:0": {"seen": 1}}},
         [HOUR, HOUR, 1, "m:g:b", '{"inc": "i", "seen": 0}', "m:g:a", '{"inc": "i", "seen": 1}'], [],
         {"roster": {"m:g:b": {"inc": "i", "seen": 2}, "o:g:a": {"inc": "i", "seen": 2}, "r:a": {"epoch": 1, "till": 2},
                     "g:g": group(seen=2)}}),
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


TEXT = json.dumps("t" * 50)
NO_INC = json.dumps({"inc": 3, "more": "t" * 50}, separators=(",", ":"))


def ordered(**fields: Any) -> Content:
    """Return the roster of an ordered group ``o`` of two ranks, with rank 1."""
    record = group(kind="ordered", world=2, first=3)
    return {"g:o": record, "m:o:rank-1": {"inc": "i", "seen": 1}, **fields}


RANK = ["live:m", "o", 1, "i"]
NOT_LIVE = ("live:other", "gone:m", "abandoned:m", None)
POSITIONS = [
    *(Case("report_position", f"a state {state} ends the reports",
           {"roster": ordered(), **({"state": state} if state else {})}, [*RANK, 5], -1) for state in NOT_LIVE),
    Case("report_position", "a damaged state is named", {"roster": ordered(), "state": "z" * 50}, [*RANK, 5],
         ResponseError(f'PENSTOCK damaged state "{"z" * 40}"')),
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
           [*RANK, *more], ResponseError(f"Expected an object{what}, found {text[:40]}"))
      for script, more in (("report_position", [5]), ("rewind_position", [7, 2, 0, -1]))
      for name, text, what in (("g:o", TEXT, ""), ("m:o:rank-1", TEXT, ""),
                               ("m:o:rank-1", NO_INC, " with inc"))),
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

ENTRY = ["meta", "header", "x", "12345"]
TWO = {"1-0": ENTRY, "2-0": ENTRY}
GIVEN: tuple[str, dict[str, tuple[Any, ...]]] = ("2-0", {"1-0": ("a", 1), "2-0": ("b", 2)})
LIVE: Content = {"state": "live:m", "entries": Log(TWO, {"g": GIVEN})}
FIRST_DONE = Log(TWO, {"g": ("2-0", {"2-0": ("b", 2)})})


def not_live(script: str, before: Content, arguments: list[Any], keys: list[str] | None = None) -> list[Case]:
    """Return the cases of an epoch that has another state than the caller knows."""
    found = [
        Case(script, f"an epoch that is {state} takes nothing", {**before, "state": state}, arguments, -1, {}, keys)
        for state in ("gone:m", "abandoned:m", "live:other")
    ]
    error = ResponseError('PENSTOCK damaged state "' + "z" * 40 + '"')
    found.append(Case(script, "a damaged state is named", {**before, "state": "z" * 50}, arguments, error, {}, keys))
    gone = {name: content for name, content in before.items() if name != "state"}
    return [*found, Case(script, "an epoch without a state takes nothing", gone, arguments, -1, {}, keys)]


ACK = ["state", "entries", "ledger", "ledger1"]
GROUPS = [
    *not_live("acknowledge", LIVE, ["live:m", "g", 1, "1-0", 1, 0, 5], ACK[:3]),
    Case("acknowledge", "one entry of two, with its bits", LIVE, ["live:m", "g", 1, "1-0", 1, 0, 1], 1,
         {"entries": FIRST_DONE, "ledger": b"\x80"}, ACK[:3]),
    Case("acknowledge", "bits alone, and none of an empty range", LIVE,
         ["live:m", "g", 0, 2, 2, 4, 13, 13], 0, {"ledger": b"\x30"}, ACK[:3]),
    Case("acknowledge", "both entries, in two ledgers, with several ranges", LIVE,
         ["live:m", "g", 2, "1-0", "2-0", 2, 0, 8, 9, 27, 1, 3, 8], 2,
         {"entries": Log(TWO, {"g": ("2-0", {})}), "ledger": b"\xff\x7f\xff\xe0", "ledger1": b"\x1f"}, ACK),
    *not_live("dead_letter", LIVE, ["live:m", "g", "1-0", "bad"]),
    Case("dead_letter", "the entry is acknowledged and kept by its reason", LIVE, ["live:m", "g", "1-0", "bad"], 1,
         {"entries": FIRST_DONE, "dead": {"1-0": {"why": "bad", "at": NOW}}}),
    *not_live("give_up_samples", LIVE, ["live:m", "g", "1-0", "f", "v", 1, 0, 3]),
    Case("give_up_samples", "the entry is acknowledged, and all its samples", LIVE,
         ["live:m", "g", "1-0", "f", "v", 2, 1, 3, 7, 8], 1,
         {"entries": FIRST_DONE, "dead": {"f": "v"}, "ledger": b"\x61"}),
    Case("give_up_samples", "samples without an entry", LIVE, ["live:m", "g", "", "f", "v", 1, 0, 1], 1,
         {"dead": {"f": "v"}, "ledger": b"\x80"}),
    *not_live("retry_dead_letter", {**LIVE, "dead": {"1-0": "x"}}, ["live:m", "g", "1-0"]),
    Case("retry_dead_letter", "an unknown dead letter", {**LIVE, "dead": {"2-0": "x"}}, ["live:m", "g", "1-0"], 0),
    Case("retry_dead_letter", "an entry that was trimmed",
         {"state": "live:m", "entries": Log({"2-0": ENTRY}, {"g": ("2-0", {})}), "dead": {"1-0": "x"}},
         ["live:m", "g", "1-0"], 0),
    Case("retry_dead_letter", "a dead letter is pending again",
         {"state": "live:m", "entries": Log(TWO, {"g": ("2-0", {})}), "dead": {"1-0": "x", "2-0": "y"}},
         ["live:m", "g", "1-0"], 1,
         {"entries": Log(TWO, {"g": ("2-0", {"1-0": ("~released", 1, True)})}), "dead": {"2-0": "y"}}),
    Case("claim_entry", "another member's entry is claimed", LIVE, ["g", "c", "a", 0, "1-0", 4], 1,
         {"entries": Log(TWO, {"g": ("2-0", {"1-0": ("c", 4, True), "2-0": ("b", 2)})})}),
    Case("claim_entry", "an entry that changed hands is left", LIVE, ["g", "c", "b", 0, "1-0", 4], 0),
    Case("claim_entry", "an entry that is not idle is left", LIVE, ["g", "c", "a", HOUR, "1-0", 4], 0),
    Case("claim_entry", "an epoch that was released", {}, ["g", "c", "a", 0, "1-0", 4], 0),
    Case("claim_entry", "a damaged key is named", {"entries": "text"}, ["g", "c", "a", 0, "1-0", 4], REFUSED),
    Case("forget_consumers", "a member without pending entries", {"e": Log(TWO, {"g": GIVEN}),
                                                                 "f": Log(TWO, {"g": GIVEN})}, ["g", "c"], 2, {},
         ["e", "gone", "f"]),
    Case("forget_consumers", "a member with a pending entry stays", {"e": Log(TWO, {"g": GIVEN})}, ["g", "a"], 0, {},
         ["e"]),
    Case("describe_entry", "an entry that is gone", {"entries": Log(TWO)}, ["3-0", 100], []),
    Case("describe_entry", "header, names and bytes", {"entries": Log(TWO)}, ["1-0", 6],
         [b"header", b"meta", 6, b"x", 5]),
    Case("describe_entry", "a header that is too long", {"entries": Log(TWO)}, ["1-0", 5], [b"", b"meta", 6, b"x", 5]),
    Case("describe_entry", "an entry without a header", {"entries": Log({"1-0": ["a" * 201, "b"]})}, ["1-0", 6],
         [b"", b"a" * 200, 1]),
    Case("read_headers", "each header, or why there is none",
         {"entries": Log({"1-0": ENTRY, "2-0": ["x", "1"], "4-0": ["meta", ""], "5-0": ["meta", "longest"]})},
         [6, "1-0", "2-0", "3-0", "4-0", "5-0"], [b"header", b"-", b"", b"-", b"-"]),
    Case("list_entries", "payloads are counted, without shapes and the header",
         {"entries": Log({"1-0": [*ENTRY, "y.shapes", "[1]", "z", "1"], "2-0": ["meta", "longest"],
                          "3-0": ["x", "12", "meta", "12"], "4-0": ENTRY})}, ["1-0", 3, 6],
         [[b"1-0", b"header", 6], [b"2-0", b"", 0], [b"3-0", b"", 4]]),
    Case("list_committed", "records that name an entry",
         {"index": Log({"1-0": ["e", "7-0", "f", "0"], "2-0": ["e", "", "f", "1"], "3-0": ["x", "8-0"],
                        "4-0": ["e", "9-0"], "5-0": ["e", "10-0"]})}, ["1-0", 4], b"1-0 7-0 4-0 9-0"),
    Case("read_index", "a page", {"index": Log({"1-0": ["e", "7-0"], "2-0": ["e", "8-0"], "3-0": ["e", "9-0"]})},
         ["(1-0", 1], b'[["2-0",["e","8-0"]]]'),
    Case("touch", "a hash stays", {"hash": {"id": "s"}}, [], 1),
    Case("touch", "nothing is made where there is nothing", {}, [], 1),
]  # fmt: skip


def indexed(**more: str) -> list[str]:
    """Return the index record of five samples from 0, of the entry 1-0."""
    return [x for pair in {"e": "1-0", "f": "0", "n": "5", "b": "9", "h": "[]", **more}.items() for x in pair]


def committed(index: dict[str, list[str]], last: str = "1-0", **more: Any) -> Content:
    """Return a partition with an entry that a commit has just appended, 2-0."""
    return {"entries": Log(TWO, {"A": OTHER, "_last": (last, {})}), "index": Log(index), "state": "live:m",
            "roster": {"bytes": "9", "b:7": "9"}, **more}  # fmt: skip


def record(entry: str, first: str = "5", count: str = "3", **more: str) -> list[str]:
    """Return the record that a commit writes."""
    fields = {"e": entry, "f": first, "n": count, "b": "6", "h": "[]", **more}
    return [x for pair in fields.items() for x in pair]


OTHER: tuple[str, dict[str, tuple[Any, ...]]] = ("0-1", {})
APPENDED = Log(TWO, {"A": OTHER, "_last": ("2-0", {})})
TAKEN_BACK = Log({"1-0": ENTRY}, {"A": OTHER, "_last": ("1-0", {})})
NEXT = ["live:m", 7, 8, 5, 3, 6, "[]", "", ""]
IN_SEGMENT = [*NEXT[:7], "s", ""]
OWNED = {"5-0": indexed(w="me")}
COMMITS = [
    Case("commit", "the next block is counted and indexed", committed({"5-0": indexed()}), NEXT, 15,
         {"entries": APPENDED, "index": Log({"5-0": indexed(), "8-0": record("2-0")}),
          "roster": {"bytes": "15", "b:7": "15"}}, KEYS["commit"][:5]),
    Case("commit", "an epoch without a state takes nothing", {"entries": committed({})["entries"]}, NEXT,
         [b"0-0", b"", b"0", b""], {"entries": TAKEN_BACK}),
    Case("commit", "the first block of a shard", committed({}), ["live:m", 7, 3, 0, 3, 6, "[]", "", ""], 15,
         {"entries": APPENDED, "index": Log({"3-0": record("2-0", "0")}),
          "roster": {"bytes": "15", "b:7": "15"}}),
    Case("commit", "the first writer owns the shard", committed({}), ["live:m", 7, 3, 0, 3, 6, "[]", "", "me"], 15,
         {"entries": APPENDED, "index": Log({"3-0": record("2-0", "0", w="me")}),
          "roster": {"bytes": "15", "b:7": "15"}}),
    Case("commit", "the owner goes on", committed(OWNED), [*NEXT[:8], "me"], 15,
         {"entries": APPENDED, "index": Log({**OWNED, "8-0": record("2-0", w="me")}),
          "roster": {"bytes": "15", "b:7": "15"}}),
    *(Case("commit", f"the writer {writer!r} is taken back", committed(OWNED), [*NEXT[:8], writer],
           [b"5-0", b"live:m", b"9", b"me"], {"entries": TAKEN_BACK}) for writer in ("", "other")),
    *(Case("commit", f"a block that begins at {first} is taken back", committed({"5-0": indexed()}),
           ["live:m", 7, 8, first, 3, 6, "[]", "", ""], [b"5-0", b"live:m", b"9", b""], {"entries": TAKEN_BACK})
      for first in (0, 4, 6)),
    Case("commit", "a block behind nothing is taken back", committed({}, roster={"x": "1"}), NEXT,
         [b"0-0", b"live:m", b"0", b""], {"entries": TAKEN_BACK}),
    Case("commit", "an epoch that ended takes nothing", committed({"5-0": indexed()}, state="abandoned:m"), NEXT,
         [b"5-0", b"abandoned:m", b"9", b""], {"entries": TAKEN_BACK}),
    Case("commit", "nothing was appended", committed({}, last="2-0"), NEXT,
         ResponseError("PENSTOCK nothing was appended")),
    Case("commit", "an epoch that is gone stays gone", {"roster": {"x": "1"}}, NEXT, [b"0-0", b"", b"0", b""]),
    Case("commit", "holes alone append nothing", committed({"5-0": indexed()}),
         ["live:m", 7, 6, 5, 0, 0, "[5]", "", "", "5", "why"], 9,
         {"index": Log({"5-0": indexed(), "6-0": ["e", "", "f", "5", "n", "0", "b", "0", "h", "[5]"]}),
          "quarantine": {"5": "why"}}),
    Case("commit", "holes that do not come next leave no trace", committed({"5-0": indexed()}),
         ["live:m", 7, 7, 6, 0, 0, "[6]", "", "", "6", "why"], [b"5-0", b"live:m", b"9", b""]),
    Case("commit", "bad samples beside good ones", committed({"5-0": indexed()}),
         [*NEXT, "6", "why", "7", "that"], 15,
         {"entries": APPENDED, "index": Log({"5-0": indexed(), "8-0": record("2-0")}),
          "quarantine": {"6": "why", "7": "that"}, "roster": {"bytes": "15", "b:7": "15"}}),
    Case("commit", "an entry in a segment is counted there", committed({"5-0": indexed()}, segments={"s": "1"}),
         IN_SEGMENT, 15,
         {"entries": APPENDED, "index": Log({"5-0": indexed(), "8-0": record("2-0", s="s")}),
          "segments": {"s": "2"}, "roster": {"bytes": "15", "b:7": "15"}}),
    Case("commit", "an entry in a sealed segment is taken back", committed({"5-0": indexed()}, segments={"s:s": "2"}),
         IN_SEGMENT, ResponseError("PENSTOCK its segment is sealed"), {"entries": TAKEN_BACK}),
    Case("commit_repair", "an appended entry is counted and indexed", committed({"5-0": indexed()}),
         [7, "9-0", 5, 3, 6, "[]", ""], b"2-0",
         {"entries": APPENDED, "index": Log({"5-0": indexed(), "9-0": record("2-0")}),
          "roster": {"bytes": "15", "b:7": "15"}}, ["entries", "index", "roster"]),
    Case("commit_repair", "an entry of one sample is counted", committed({}), [7, "9-0", 5, 1, 6, "[]", ""], b"2-0",
         {"entries": APPENDED, "index": Log({"9-0": record("2-0", count="1")}),
          "roster": {"bytes": "15", "b:7": "15"}}, ["entries", "index", "roster"]),
    Case("commit_repair", "nothing was appended", committed({}, last="2-0"), [7, "9-0", 5, 3, 6, "[]", ""],
         ResponseError("PENSTOCK nothing was appended"), {}, ["entries", "index", "roster"]),
    Case("commit_repair", "an entry that was there is only indexed", committed({}), [7, "9-0", 5, 3, 6, "[]", "1-0"],
         b"1-0", {"index": Log({"9-0": record("1-0")})}, ["entries", "index", "roster"]),
    Case("commit_repair", "holes alone are only indexed", committed({}), [7, "9-0", 5, 0, 6, "[]", ""], b"",
         {"index": Log({"9-0": record("", count="0")})}, ["entries", "index", "roster"]),
]  # fmt: skip

FULL = {"e:7": "m", "b:7": "9", "bytes": "12", "t:7": "1", "p:7": "5", "gen": "4"}
AWAY = group(holds=False)
READING = {"g:a": group(first=7), "g:b": group(first=8), "g:c": group(kind="ordered"), "g:d": group(), "g:e": group(),
           "m:a:x": "{}"}  # fmt: skip
REMOVALS = [
    Case("trim", "a roster that changed", {"roster": FULL, "entries": Log(TWO)}, [3, 7, "1-0", 4, ""], -1),
    Case("trim", "a roster without a generation is at 0", {"roster": {"b:7": "9", "bytes": "12"}, "entries": Log(TWO)},
         [0, 7], 0, {"roster": {"b:7": "9", "bytes": "12", "t:7": "1"}}),
    Case("trim", "entries go with their bytes, once",
         {"roster": FULL, "entries": Log(TWO), "segments": {"s": "2"}},
         [4, 7, "1-0", 4, "s", "2-0", 5, "", "3-0", 6, "s"], 9,
         {"roster": {**FULL, "b:7": "0", "bytes": "3"}, "entries": Log({}), "segments": {"s": "1"}}),
    *(Case(script, "groups that hold nothing note what they lost",
           {"roster": {"gen": "4", "e:7": "m", "g:late": group(holds=False, first=8), "g:new": AWAY,
                       "g:more": group(holds=False, lost=[3, 9]), "g:low": group(holds=False, lost=[8, 9], first=7),
                       "g:done": AWAY, "d:done:7": "1", "g:holds": group()}, "state": "live:m"}, arguments, 0,
           {"roster": {**after, "g:late": group(holds=False, first=8), "g:new": {**AWAY, "lost": [7, 7]},
                       "g:more": group(holds=False, lost=[3, 9]), "g:low": group(holds=False, lost=[7, 9], first=7),
                       "g:holds": group()}, **more})
      for script, arguments, after, more in (
          ("trim", [4, 7], {"gen": "4", "e:7": "m", "t:7": "1", "b:7": "0", "bytes": "0", "d:done:7": "1",
                            "g:done": AWAY}, {}),
          ("retire_epoch", [4, 7, "m"],
           {"gen": "4", "x:7": "m", "bytes": "0", "retired": "7-7", "g:done": {**AWAY, "read": 7}},
           {"state": "gone:m"}))),
    Case("retire_epoch", "a roster that changed", {"roster": FULL, "state": "live:m"}, [3, 7, "m"], -1),
    Case("retire_epoch", "an unknown epoch", {"roster": FULL, "state": "live:m"}, [4, 8, "m"], 0),
    Case("retire_epoch", "an epoch of another manifest stays", {"roster": FULL, "state": "live:m"}, ["", 7, "n"], 0),
    Case("unlink_retired", "the keys of a retired epoch go",
         {"roster": {"x:7": "m"}, "state": "gone:m", "entries": Log(TWO)}, [7, "m"], 2,
         {"state": None, "entries": None}, keys=["roster", "state", "entries"]),
    Case("unlink_retired", "the keys of an epoch that is not being released stay", {"roster": FULL, "state": "live:m"},
         [7, "m"], 0, keys=["roster", "state"]),
    Case("unlink_retired", "the keys of another manifest stay", {"roster": {"x:7": "other"}, "state": "gone:other"},
         [7, "m"], 0, keys=["roster", "state"]),
    Case("forget_field", "the field goes", {"roster": {"x:7": "m", "gen": "4"}}, ["x:7", "m"], 1,
         {"roster": {"gen": "4"}}, keys=["roster"]),
    Case("forget_field", "a field with another value stays", {"roster": {"x:7": "other"}}, ["x:7", "m"], 0,
         keys=["roster"]),
    *(Case("unlink_named", f"keys go with {what}", {"meta": meta, "epochs": {"7": "open"}}, ["s"], count,
           {"meta": None, "epochs": None}, keys=["meta", "epochs", "meta"])
      for what, meta, count in (("their stream", {"id": "s"}, 2), ("no stream", None, 1))),
    Case("unlink_named", "a meta that is no hash goes", {"meta": "damaged"}, [""], 1, {"meta": None},
         keys=["meta", "meta"]),
    Case("unlink_named", "the keys of a newer stream stay", {"meta": {"id": "t"}, "epochs": {"7": "open"}}, ["s"], -1,
         keys=["meta", "epochs", "meta"]),
    Case("retire_epoch", "an epoch goes with its bytes", {"roster": FULL, "state": "live:m"}, ["", 7, "m"], 9,
         {"roster": {"bytes": "3", "gen": "4", "x:7": "m", "retired": "7-7"}, "state": "gone:m"}),
    Case("retire_epoch", "no group has lost an epoch without a commit",
         {"roster": {"gen": "4", "e:7": "m", "g:away": AWAY}, "state": "live:m"}, ["", 7, "m", 1], 0,
         {"roster": {"bytes": "0", "gen": "4", "x:7": "m", "retired": "7-7", "g:away": AWAY}, "state": "gone:m"}),
    Case("retire_epoch", "a commit that the caller did not see is lost",
         {"roster": {"gen": "4", "e:7": "m", "b:7": "0", "g:away": AWAY}, "state": "live:m"}, ["", 7, "m", 1], 0,
         {"roster": {"bytes": "0", "gen": "4", "x:7": "m", "retired": "7-7", "g:away": {**AWAY, "lost": [7, 7]}},
          "state": "gone:m"}),
    *(Case("retire_epoch", f"released were {before}", {"roster": {"e:7": "m", "retired": before}, "state": "live:m"},
           [0, 7, "m"], 0,
           {"roster": {"bytes": "0", "x:7": "m", "retired": after}, "state": "gone:m"})
      for before, after in (("5-6", "5-7"), ("1-2,4-6", "1-2,4-7"), ("5-5", "5-5,7-7"), ("5-8", "5-8,7-7"))),
    Case("retire_epoch", "its waits and notes go, and no other's",
         {"roster": {"e:7": "m", "w:7:10": "x", "w:77:1": "x", "w:1:7": "x", "d:g:7": "1", "d:g:17": "1", "d:h:7": "1",
                     "g:g": group(read=9), "g:h": group(read=3)}, "state": "live:m"}, [0, 7, "m"], 0,
         {"roster": {"bytes": "0", "x:7": "m", "retired": "7-7", "w:77:1": "x", "w:1:7": "x", "d:g:17": "1",
                     "g:g": group(read=9), "g:h": group(read=7)}, "state": "gone:m"}),
    Case("undo_open_epoch", "keys of another manifest stay", {"roster": {**FULL, "e:7": "other"}, "state": "live:other",
                                                             "entries": Log(TWO)}, [7, "m"], 0),
    Case("undo_open_epoch", "the epoch goes with its bytes", {"roster": FULL, "state": "live:m", "entries": Log(TWO)},
         [7, "m"], 1, {"roster": {"bytes": "3", "gen": "4"}, "state": None, "entries": None}),
    Case("undo_open_epoch", "a state that is another's stays", {"roster": {"e:7": "m", "gen": "4"}, "state": "gone:m"},
         [7, "m"], 1, {"roster": {"gen": "4"}}),
    Case("open_epoch", "an epoch that is being released", {"roster": {"x:7": "m"}}, [7, "m"], 0),
    Case("open_epoch", "another manifest is refused", {"roster": {"e:7": "other"}}, [7, "m"], REFUSED),
    Case("open_epoch", "every shared group that begins by then reads it", {"roster": READING}, [7, "m"], 1,
         {"roster": {**READING, "e:7": "m"}, "state": "live:m",
          "entries": Log({}, {name: ("0-0", {}) for name in ("_last", "a", "d", "e")})}),
    Case("open_epoch", "what is open stays", {"roster": {"e:7": "m"}, "state": "abandoned:m",
                                              "entries": Log(TWO, {"_last": ("2-0", {})})}, [7, "m"], 1),
    Case("open_epoch", "a key that is no stream is named", {"roster": {}, "entries": "text"}, [7, "m"], REFUSED,
         {"roster": {"e:7": "m"}, "state": "live:m"}),
]  # fmt: skip

INC = {"inc": "i", "seen": 1}
HOME: Content = {"roster": {"g:g": group(), "m:g:a": INC}, "e": Log(TWO, {"g": GIVEN}), "f": Log(TWO, {"g": GIVEN})}
RKEYS = ["roster", "e", "f"]
BEAT = ["g", "a", "i", -1, 0]
MEMBERS = [
    Case("heartbeat", "leases are renewed, and lost ones are named", HOME, [*BEAT, 2, "1-0", "2-0", 1, "2-0"],
         [[b"2-0"], [b"2-0"]],
         {"roster": {"g:g": group(seen=NOW), "m:g:a": {"inc": "i", "seen": NOW}},
          "e": Log(TWO, {"g": ("2-0", {"1-0": ("a", 1, True), "2-0": ("b", 2)})})}, RKEYS),
    Case("heartbeat", "a released epoch has no leases", {"roster": HOME["roster"]}, [*BEAT, 1, "1-0"], [[b"1-0"]],
         {"roster": {"g:g": group(seen=NOW), "m:g:a": {"inc": "i", "seen": NOW}}}, RKEYS[:2]),
    *(Case("heartbeat", f"a member that has waited {idle} ms says so", {"roster": HOME["roster"]},
           ["g", "a", "i", idle, 70], [],
           {"roster": {"g:g": group(seen=NOW), "m:g:a": {"inc": "i", "seen": NOW, "idle": NOW - idle, "handed": 70}}},
           RKEYS[:1]) for idle in (0, 500)),
    *(Case("heartbeat", f"{claim} is told", {"roster": roster}, BEAT, ResponseError(error), {}, RKEYS[:1])
      for claim, roster, error in (
          ("a member of no group", {"m:g:a": INC}, "PENSTOCK gone"),
          ("a member that is gone", {"g:g": group()}, "PENSTOCK gone"),
          ("a member that is gone, and whose name is its own", {"g:g": group(), "o:g:a": INC}, "PENSTOCK gone"),
          ("a member that is gone, and whose name was taken", {"g:g": group(), "o:g:a": {"inc": "j", "seen": 1}},
           "PENSTOCK replaced"),
          ("a member whose name was taken", {"g:g": group(), "m:g:a": {"inc": "j", "seen": 1}}, "PENSTOCK replaced"),
          ("a damaged member", {"g:g": group(), "m:g:a": TEXT}, f"Expected an object, found {TEXT[:40]}"),
          ("a damaged incarnation", {"g:g": group(), "m:g:a": NO_INC},
           f"Expected an object with inc, found {NO_INC[:40]}"))),
    Case("leave_group", "another process has the name", {"roster": {"g:g": group(), "m:g:a": {"inc": "j", "seen": 1}}},
         ["g", "a", "i"], 0, {}, RKEYS[:1]),
    Case("leave_group", "a name that nobody has", {"roster": {"g:g": group()}}, ["g", "a", "i"], 0, {}, RKEYS[:1]),
    Case("leave_group", "its entries are returned, and no other's", HOME,
         ["g", "a", "i", 2, "1-0", "2-0", 1, "1-0"], 1,
         {"roster": {"g:g": group(holds=False)},
          **{key: Log(TWO, {"g": ("2-0", {"1-0": ("~released", 1, True), "2-0": ("b", 2)})}) for key in "ef"}}, RKEYS),
    Case("leave_group", "an entry of one epoch is not returned in another", HOME, ["g", "a", "i", 1, "1-0", 0], 1,
         {"roster": {"g:g": group(holds=False)},
          "e": Log(TWO, {"g": ("2-0", {"1-0": ("~released", 1, True), "2-0": ("b", 2)})})}, RKEYS),
    Case("leave_group", "a released epoch has no entries", {"roster": HOME["roster"]}, ["g", "a", "i", 1, "1-0"], 1,
         {"roster": {"g:g": group(holds=False)}}, RKEYS[:2]),
    Case("leave_group", "a group with another member goes on",
         {"roster": {"g:g": group(), "m:g:a": INC, "m:g:b": INC}}, ["g", "a", "i"], 1,
         {"roster": {"g:g": group(), "m:g:b": INC}}, RKEYS[:1]),
    Case("leave_group", "a declared group goes on without members",
         {"roster": {"g:g": group(declared=True), "m:g:a": INC, "m:gg:a": INC}}, ["g", "a", "i"], 1,
         {"roster": {"g:g": group(declared=True), "m:gg:a": INC}}, RKEYS[:1]),
    Case("leave_group", "the member of a group that is gone", {"roster": {"m:g:a": INC, "x": "1"}}, ["g", "a", "i"], 1,
         {"roster": {"x": "1"}}, RKEYS[:1]),
    Case("reset_group", "a group that is gone", {"roster": {"x": "1"}}, ["g", 1],
         ResponseError("PENSTOCK no group"), {}, RKEYS[:1]),
    Case("reset_group", "a group reads again from its first epoch",
         {"roster": {"g:g": group(first=9, lost=[2, 3]), "d:g:4": "1", "d:g:5": "1", "d:h:5": "1"},
          "e": Log(TWO, {"g": GIVEN}), "f": Log(TWO, {"g": GIVEN})}, ["g", 5, 4, 5], 1,
         {"roster": {"g:g": group(first=5), "d:h:5": "1", "gen": "1"}, "e": Log(TWO),
          "f": Log(TWO, {"g": ("0-0", {})})}, RKEYS),
    Case("reset_group", "an ordered group has no Redis groups",
         {"roster": {"g:g": group(kind="ordered")}, "e": Log(TWO)}, ["g", 4, 4], 1,
         {"roster": {"g:g": group(kind="ordered", first=4), "gen": "1"}}, RKEYS[:2]),
]  # fmt: skip


def join(member: str = "a", *, declared: int = 0, first: int = 0, raised: int = 0, force: int = 0, kind: str = "shared",
         world: int = 0, batch: int = 0, look: int = 0, epochs: tuple[int, ...] = ()) -> list[Any]:  # fmt: skip
    """Return the arguments of join_group for the group ``g``."""
    return ["g", member, "i", declared, first, raised, force, kind, world, batch, HOUR, look, *epochs]


LOST = json.dumps(group(first=4, holds=False))
MINE = {"inc": "i", "seen": NOW}
RANKED = group(kind="ordered", world=2, batch=8)
BUSY = {"g:g": RANKED, "m:g:a": INC, "m:g:b": {"inc": "j", "seen": NOW - HOUR // 2}, "m:gg:c": INC, "gen": "4"}
QUIET = {**BUSY, **{f"m:g:{name}": {"inc": "j", "seen": NOW - 2 * HOUR} for name in "bcd"}}
JOINS = [
    Case("join_group", "a caller must know every epoch", {"roster": {"e:3": "m", "e:4": "m"}}, join(epochs=(3,)),
         [b"epochs"], {}, RKEYS[:2]),
    Case("join_group", "a new group begins at the lowest epoch",
         {"roster": {"e:4": "m", "e:3": "m"}, "e": Log(TWO), "f": Log(TWO)}, join(epochs=(3, 4)), [b"joined", 3, 1],
         {"roster": {"e:3": "m", "e:4": "m", "g:g": group(first=3, seen=NOW), "m:g:a": MINE, "gen": "1"},
          "e": Log(TWO, {"g": ("0-0", {})}), "f": Log(TWO, {"g": ("0-0", {})})}, RKEYS),
    Case("join_group", "a new group begins behind a trimmed epoch",
         {"roster": {"e:3": "m", "e:4": "m", "t:3": "1"}, "e": Log(TWO), "f": Log(TWO)}, join(epochs=(3, 4)),
         [b"joined", 4, 1],
         {"roster": {"e:3": "m", "e:4": "m", "t:3": "1", "g:g": group(first=4, seen=NOW), "m:g:a": MINE, "gen": "1"},
          "f": Log(TWO, {"g": ("0-0", {})})}, RKEYS),
    Case("join_group", "a new group begins where it asks, and is shared", {"roster": {"x": "1"}},
         join(first=5, kind=""), [b"joined", 5, 1],
         {"roster": {"x": "1", "g:g": group(first=5, seen=NOW), "m:g:a": MINE, "gen": "1"}}, RKEYS[:1]),
    Case("join_group", "a group is declared without a member", {"roster": {"x": "1"}}, join("", declared=1),
         [b"joined", 0, 1], {"roster": {"x": "1", "g:g": group(declared=True, seen=NOW), "gen": "1"}}, RKEYS[:1]),
    Case("join_group", "a declared group stays declared", {"roster": {"g:g": group(declared=True)}}, join(),
         [b"joined", 0, 0], {"roster": {"g:g": group(declared=True, seen=NOW), "m:g:a": MINE}}, RKEYS[:1]),
    Case("join_group", "another kind is refused", {"roster": {"g:g": group(kind="ordered")}}, join(),
         [b"kind", b"ordered"], {}, RKEYS[:1]),
    Case("join_group", "any kind is accepted", {"roster": {"g:g": group(kind="ordered")}}, join(kind=""),
         [b"joined", 0, 0], {"roster": {"g:g": group(kind="ordered", seen=NOW), "m:g:a": MINE}}, RKEYS[:1]),
    Case("join_group", "another batch is refused", {"roster": {"g:g": RANKED}}, join(kind="ordered", world=2, batch=9),
         [b"batch", 8], {}, RKEYS[:1]),
    Case("join_group", "a batch of 1 is a batch", {"roster": {"g:g": RANKED}}, join(kind="ordered", world=2, batch=1),
         [b"batch", 8], {}, RKEYS[:1]),
    Case("join_group", "an unknown batch is accepted", {"roster": {"g:g": RANKED}}, join(kind="ordered"),
         [b"joined", 0, 0], {"roster": {"g:g": {**RANKED, "seen": NOW}, "m:g:a": MINE}}, RKEYS[:1]),
    Case("join_group", "ranks of an ordered group that had none", {"roster": {"g:g": group(kind="ordered")}},
         join(kind="ordered", world=1, batch=8), [b"joined", 0, 0],
         {"roster": {"g:g": group(kind="ordered", world=1, batch=8, seen=NOW), "m:g:a": MINE}}, RKEYS[:1]),
    Case("join_group", "a loss is told", {"roster": {"g:g": group(lost=[2, 5])}}, join(), [b"lost", 2, 5], {},
         RKEYS[:1]),
    Case("join_group", "a loss is accepted", {"roster": {"g:g": group(lost=[2, 5])}}, join(force=1), [b"joined", 0, 0],
         {"roster": {"g:g": group(seen=NOW), "m:g:a": MINE}}, RKEYS[:1]),
    Case("join_group", "a group goes on behind the lost epochs that were trimmed",
         {"roster": {"g:g": group(lost=[2, 5]), **dict.fromkeys(("t:0", "t:3", "t:5", "d:g:5", "t:6"), "1")}},
         join(force=1), [b"joined", 4, 0],
         {"roster": {"g:g": group(first=4, seen=NOW), "m:g:a": MINE,
                     **dict.fromkeys(("t:0", "t:3", "t:5", "d:g:5", "t:6"), "1")}}, RKEYS[:1]),
    Case("join_group", "a first epoch is raised", {"roster": {"g:g": group(first=2)}}, join(first=5, raised=1),
         [b"joined", 5, 0], {"roster": {"g:g": group(first=5, seen=NOW), "m:g:a": MINE}}, RKEYS[:1]),
    Case("join_group", "a first epoch is not lowered", {"roster": {"g:g": group(first=5)}}, join(first=2, raised=1),
         [b"joined", 5, 0], {"roster": {"g:g": group(first=5, seen=NOW), "m:g:a": MINE}}, RKEYS[:1]),
    Case("join_group", "a first epoch stays unless it is raised", {"roster": {"g:g": group(first=2)}}, join(first=5),
         [b"joined", 2, 0], {"roster": {"g:g": group(first=2, seen=NOW), "m:g:a": MINE}}, RKEYS[:1]),
    Case("join_group", "a group that held nothing holds again", {"roster": {"g:g": group(holds=False), "gen": "4"}},
         join(), [b"joined", 0, 0], {"roster": {"g:g": group(seen=NOW), "m:g:a": MINE, "gen": "5"}}, RKEYS[:1]),
    Case("join_group", "the process that had the name learns of it",
         {"roster": {"g:g": group(), "m:g:a": {"inc": "j", "seen": 1}}}, join(), [b"joined", 0, 0],
         {"roster": {"g:g": group(seen=NOW), "m:g:a": MINE, "o:g:a": MINE}}, RKEYS[:1]),
    Case("join_group", "a damaged group is named", {"roster": {"g:g": TEXT}}, join(),
         ResponseError(f"Expected an object, found {TEXT[:40]}"), {}, RKEYS[:1]),
    Case("join_group", "a damaged member is named", {"roster": {"g:g": group(holds=False), "m:g:a": NO_INC}}, join(),
         ResponseError(f"Expected an object with inc, found {NO_INC[:40]}"),
         {"roster": {"g:g": group(seen=NOW), "m:g:a": NO_INC, "gen": "1"}}, RKEYS[:1]),
    Case("join_group", "a member that knows no ranks changes nothing of them",
         {"roster": {"e:3": "m", **BUSY}, "e": {"1": "4"}}, join("c", kind="ordered", epochs=(3,)), [b"joined", 0, 0],
         {"roster": {"e:3": "m", **BUSY, "g:g": {**RANKED, "seen": NOW}, "m:g:c": MINE}}, RKEYS[:2]),
    Case("join_group", "the same number of ranks changes nothing of them",
         {"roster": {"e:3": "m", **QUIET}, "e": {"1": "4"}}, join(kind="ordered", world=2, batch=8, epochs=(3,)),
         [b"joined", 0, 0],
         {"roster": {"e:3": "m", **QUIET, "g:g": {**RANKED, "seen": NOW}, "m:g:a": MINE}}, RKEYS[:2]),
    Case("join_group", "other ranks that live are named", {"roster": BUSY},
         join(kind="ordered", world=3, batch=8), [b"busy", 2, b"b"], {}, RKEYS[:1]),
    Case("join_group", "the number of ranks changes once the old ones are silent",
         {"roster": {**QUIET, "e:3": "m", "e:4": "m"}, "e": {"0": "6", "1": "4", "2": "1"}, "f": {"1": "4"}},
         join(kind="ordered", world=3, batch=8, epochs=(3, 4)), [b"joined", 0, 0],
         {"roster": {"e:3": "m", "e:4": "m", "g:g": {**RANKED, "world": 3, "seen": NOW}, "m:g:a": MINE, "m:gg:c": INC,
                     "gen": "4"}, "e": {"floor": "4"}, "f": None}, RKEYS),
    Case("join_group", "a floor of the old ranks stays",
         {"roster": {"g:g": RANKED, "e:3": "m"}, "e": {"floor": "1", "1": "4"}},
         join(kind="ordered", world=1, batch=8, epochs=(3,)), [b"joined", 0, 0],
         {"roster": {"e:3": "m", "g:g": {**RANKED, "world": 1, "seen": NOW}, "m:g:a": MINE}, "e": {"floor": "1"}},
         RKEYS[:2]),
    Case("join_group", "a key that is no stream is named", {"roster": {"e:3": "m"}, "e": "text"}, join(epochs=(3,)),
         REFUSED, {"roster": {"e:3": "m", "g:g": group(first=3, seen=NOW), "m:g:a": MINE, "gen": "1"}}, RKEYS[:2]),
    Case("restore_group", "a caller must know every epoch", {"roster": {"e:3": "m", "e:4": "m"}},
         ["g", LOST, "a", "i", "", 0, 3], 0, {}, RKEYS[:2]),
    Case("restore_group", "a closed epoch must be known, too", {"roster": {"e:3": "m", "e:4": "m"}},
         ["g", LOST, "a", "i", "", 1, 3, 4], 0, {}, RKEYS[:2]),
    Case("restore_group", "a lost group and its member come back, and closed epochs are read",
         {"roster": {"e:3": "m", "e:4": "m", "e:5": "m", "gen": "4"}, "e3": Log(TWO), "e4": Log(TWO), "e5": Log(TWO)},
         ["g", LOST, "a", "i", "", 2, 3, 4, 3, 4, 5, 6], 1,
         {"roster": {"e:3": "m", "e:4": "m", "e:5": "m", "gen": "5", "m:g:a": MINE, "d:g:4": "1",
                     "g:g": group(first=4, holds=False, seen=NOW)},
          "e4": Log(TWO, {"g": ("2-0", {})}), "e5": Log(TWO, {"g": ("0-0", {})})}, ["roster", "e3", "e4", "e5", "e6"]),
    Case("restore_group", "what the roster still has stays",
         {"roster": {"e:3": "m", "g:g": group(first=3), "gen": "4"}, "e3": Log(TWO, {"g": GIVEN})},
         ["g", LOST, "", "i", "", 1, 3, 3], 1,
         {"roster": {"e:3": "m", "g:g": group(first=3), "gen": "4", "d:g:3": "1"}}, ["roster", "e3"]),
    Case("restore_group", "an ordered group has no Redis groups",
         {"roster": {"e:4": "m"}, "e4": Log(TWO)}, ["g", json.dumps(group(kind="ordered")), "", "", "", 0, 4], 1,
         {"roster": {"e:4": "m", "gen": "1", "g:g": group(kind="ordered", seen=NOW)}}, ["roster", "e4"]),
    Case("restore_group", "a key that is no stream is named", {"roster": {"e:3": "m", "g:g": group()}, "e": "text"},
         ["g", LOST, "", "", "", 0, 3], REFUSED, {}, RKEYS[:2]),
    Case("restore_group", "a member takes the place of one that the caller saw, and which learns of it",
         {"roster": {"g:g": group(), "m:g:a": {"inc": "j", "seen": 1}}},
         ["g", LOST, "a", "i", '{"inc": "j", "seen": 1}', 0], 1,
         {"roster": {"g:g": group(), "m:g:a": MINE, "o:g:a": MINE}}, ["roster"]),
    Case("restore_group", "a member that gave a heartbeat since keeps its place",
         {"roster": {"m:g:a": {"inc": "j", "seen": 2}}}, ["g", LOST, "a", "i", '{"inc": "j", "seen": 1}', 0], -1, {},
         ["roster"]),
    Case("restore_group", "a member that is back already stays", {"roster": {"g:g": group(), "m:g:a": MINE}},
         ["g", LOST, "a", "i", "", 0], 1, {}, ["roster"]),
    Case("join_group", "a look writes nothing, and need not know the epochs", {"roster": {"e:3": "m"}}, join(look=1),
         [b"joined", 3, 1], {}, RKEYS[:1]),
    Case("join_group", "a look at quiet ranks of another number leaves them there", {"roster": QUIET},
         join(kind="ordered", world=3, batch=8, look=1), [b"joined", 0, 0], {}, RKEYS[:1]),
    Case("join_group", "a Redis group that is there stays", {"roster": {"e:3": "m", "g:g": group()},
                                                             "e": Log(TWO, {"g": GIVEN})}, join(epochs=(3,)),
         [b"joined", 0, 0], {"roster": {"e:3": "m", "g:g": group(seen=NOW), "m:g:a": MINE}}, RKEYS[:2]),
]  # fmt: skip

EVERY = [*MANIFESTS, *ROSTERS, *POSITIONS, *GROUPS, *COMMITS, *REMOVALS, *MEMBERS, *JOINS]
CASES = {case.name: case for case in EVERY}


@pytest.mark.parametrize("name", ["touch: a hash stays", "touch: nothing is made where there is nothing"])
def test_a_touch_writes_each_time(any_client: redis.Redis, name: str) -> None:
    """WAIT answers for the last write of its connection. Without one it would answer for a block of long ago."""
    server = Server(any_client, CASES[name])
    before = any_client.info("persistence")["rdb_changes_since_last_save"]
    server.run()
    assert any_client.info("persistence")["rdb_changes_since_last_save"] > before


def test_every_script_has_a_case() -> None:
    """A new script is in the table from its first day."""
    assert {case.script for case in EVERY} == set(KEYS)


class Server:
    """A server with the keys of one case."""

    def __init__(self, client: Client, case: Case) -> None:
        self.client, self.case = client, case
        self.now = ms_of(client.time())
        client.flushall()
        for name, content in case.before.items():
            if isinstance(content, dict) and content:
                client.hset(name, mapping={key: self._text(value) for key, value in content.items()})
            elif isinstance(content, Log):
                self._append(name, content)
            elif isinstance(content, (str, bytes)):
                client.set(name, content)

    def run(self) -> tuple[Any, int]:
        """Run the script. Return its answer or error, and the time after it."""
        arguments = [json.dumps(one) if isinstance(one, dict) else one for one in self.case.arguments]
        try:
            keys = self.case.keys or KEYS[self.case.script]
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
                found[name] = self.client.get(key)
            else:
                found[name] = Log(self._entries(key), {
                    one["name"].decode(): (one["last-delivered-id"].decode(), self._pending(key, one["name"]))
                    for one in self.client.xinfo_groups(key)
                })  # fmt: skip
        return found

    def matches(self, found: Any, expected: Any, after_ms: int) -> bool:
        """Return whether a value is the expected one. A time may be any between the begin and the end of the case."""
        if isinstance(expected, Now):
            low = self.now + expected.more_ms
            return low <= int(found) <= low + after_ms - self.now
        if isinstance(expected, dict):
            same = found.keys() == expected.keys()
            return same and all(self.matches(found[key], value, after_ms) for key, value in expected.items())
        if isinstance(expected, list) and isinstance(found, Log):
            return list(found.entries.values()) == expected
        if isinstance(expected, str):
            return bool(found == (expected.encode() if isinstance(found, bytes) else _decoded(expected)))
        return bool(found == expected)

    def _append(self, name: str, log: Log) -> None:
        for entry, fields in log.entries.items():
            self.client.xadd(name, dict(zip(fields[::2], fields[1::2], strict=True)), entry)
        for group_name, (last, pending) in log.groups.items():
            self.client.xgroup_create(name, group_name, "0", mkstream=True)
            for entry, (member, deliveries) in pending.items():
                told = {"idle": 60_000, "retrycount": deliveries, "force": True, "justid": True}
                self.client.xclaim(name, group_name, member, 0, [entry], **told)
            self.client.xgroup_setid(name, group_name, last)

    def _entries(self, key: bytes) -> dict[str, list[str]]:
        return {
            entry.decode(): [text.decode() for pair in fields.items() for text in pair]
            for entry, fields in self.client.xrange(key)
        }

    def _pending(self, key: bytes, group_name: bytes) -> dict[str, tuple[Any, ...]]:
        return {
            one["message_id"].decode(): (
                one["consumer"].decode(),
                one["times_delivered"],
                *([True] if one["time_since_delivered"] < 50_000 else []),
            )
            for one in self.client.xpending_range(key, group_name, "-", "+", 100)
        }

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
        at = str(answer).find(str(case.answer))
        assert at == 0 if str(case.answer).startswith("PENSTOCK") else at > 0, answer
        assert str(answer)[at + len(str(case.answer)) :][:1] != "t", f"{answer} quotes more"
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


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.script in FREEING or name.startswith("commit: holes")]
)
def test_a_script_that_frees_first_does_the_same_at_maxmemory(own_client: Client, name: str) -> None:
    """Acknowledging, leaving and releasing free memory, so that a full server is the last place to refuse them."""
    check(own_client, CASES[name], FullServer)
