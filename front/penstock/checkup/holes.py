"""Known holes of servers that matter here, and the versions that close them. Pure.

Only what Penstock's own use meets: it runs Lua, blocks on streams, and sends large values. Distributions mend holes
without changing the version, which a server does not tell: so a finding says to look.
"""

from __future__ import annotations

from typing import NamedTuple

Version = tuple[int, ...]


class Hole(NamedTuple):
    """One."""

    name: str
    what: str
    product: str
    since: Version
    closed: tuple[Version, ...]
    """The first good version of each line, e.g. 7.2.11; later lines are good from their first version on."""
    source: str


HOLES = (
    Hole("CVE-2025-49844", "a Lua script may execute code in the server", "redis", (0,),
         ((6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
         "https://github.com/redis/redis/blob/7.2/00-RELEASENOTES (7.2.11)"),
    Hole("CVE-2025-49844", "a Lua script may execute code in the server", "valkey", (0,),
         ((7, 2, 11), (8, 0, 6), (8, 1, 4)),
         "https://github.com/valkey-io/valkey/blob/8.1/00-RELEASENOTES (8.1.4)"),
    Hole("CVE-2025-21605", "who has not logged in can fill the server's memory with unread answers", "redis", (2, 6),
         ((6, 2, 18), (7, 2, 8), (7, 4, 3)),
         "https://github.com/redis/redis/security/advisories/GHSA-r67f-p999-2gff"),
    Hole("CVE-2026-23479", "a blocked client that is evicted may be used after it was freed", "redis", (7, 2),
         ((7, 2, 14), (7, 4, 9), (8, 2, 6), (8, 4, 3), (8, 6, 3)),
         "https://github.com/redis/redis/security/advisories/GHSA-93m2-935m-8rj3"),
    Hole("CVE-2026-81934", "with TLS, a stranger may use memory of a connection that is gone", "redis", (8, 2),
         ((8, 2, 9), (8, 4, 6), (8, 6, 6), (8, 8, 2), (8, 10, 1)),
         "https://github.com/CVEProject/cvelistV5/blob/main/cves/2026/81xxx/CVE-2026-81934.json"),
    Hole("CVE-2022-35951", "XAUTOCLAIM may overflow the heap", "redis", (7, 0), ((7, 0, 5),),
         "https://github.com/redis/redis/releases/tag/7.0.5"),
    Hole("CVE-2026-63639", "a corrupt stream in an RDB file may execute code", "valkey", (0,),
         ((8, 1, 9), (9, 0, 5), (9, 1, 1)),
         "https://github.com/valkey-io/valkey/releases/tag/8.1.9"),
)  # fmt: skip


def is_open(hole: Hole, product: str, version: Version) -> bool:
    """Whether a server of that version has the hole, going by what its makers said."""
    if product != hole.product or version < hole.since:
        return False
    line = [closed for closed in hole.closed if closed[:2] == version[:2]]
    if line:
        return version < line[0]
    return version < max(hole.closed)  # a line that got no mended version, or one newer than all


def open_holes(product: str, version: Version) -> list[Hole]:
    """All that a server of that version has."""
    return [hole for hole in HOLES if is_open(hole, product, version)]


def mended_by(hole: Hole, version: Version) -> Version:
    """The nearest version that closes it."""
    return min((closed for closed in hole.closed if closed > version), default=max(hole.closed))
