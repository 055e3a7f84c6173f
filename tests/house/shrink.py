"""``python -m tests.house.shrink`` removes exceptions that no longer apply, and refuses to add any.

An exception follows its code: into another module under the same name, and in the same module into a renamed class.
Exit code 1 and the places, if the code breaks a rule where no exception says so.
"""

from __future__ import annotations

import re
import subprocess
import sys

from tests.house.rules import ROOT, RULES, excepted, found, list_of

PYPROJECT = ROOT / "pyproject.toml"


def shrunk(listed: set[str], found: set[str]) -> set[str]:
    """Return the exceptions that still apply, each under the name that its code has now."""
    kept, gone, new = listed & found, listed - found, found - listed
    for old in sorted(gone):
        if moved := next((place for place in sorted(new) if _is_moved(old, place)), None):
            kept.add(moved)
            new.remove(moved)
    return kept


def _is_moved(old: str, new: str) -> bool:
    """Tell whether a place is another's after a move to another module, or after its class was renamed."""
    (old_module, old_name), (new_module, new_name) = _parts(old), _parts(new)
    if old_module == new_module:
        return "." in old_name and "." in new_name and old_name.partition(".")[2] == new_name.partition(".")[2]
    return old_name == new_name


def _parts(place: str) -> tuple[str, str]:
    """Return the module and the qualified name; of a module itself, its package and its own name."""
    module, colon, name = place.partition(":")
    return (module, name) if colon else (module.rpartition(".")[0] + ".*", module.rpartition(".")[2])


def drop_unmatched_imports() -> list[str]:
    """Remove the import exceptions in pyproject.toml that import-linter no longer finds, and return them."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo"]
    dropped: list[str] = []
    while True:
        done = subprocess.run([*command, "--no-cache"], capture_output=True, text=True, check=False, cwd=ROOT)
        report = " ".join((done.stdout + done.stderr).split())
        unmatched = re.findall(r"No matches for ignored import (\S+ -> [\w.*]+\w)", report)
        if not unmatched:
            return dropped
        lines = PYPROJECT.read_text().splitlines(keepends=True)
        PYPROJECT.write_text("".join(line for line in lines if line.strip().strip('",') not in unmatched))
        dropped += unmatched


def main() -> int:
    """Shrink every list, print what changed, and return 1 if the code breaks a rule without an exception."""
    broken = False
    for rule, text in RULES.items():
        listed, here = set(excepted(rule)), set(found(rule))
        kept = shrunk(listed, here)
        list_of(rule).write_text("".join(f"{place}\n" for place in sorted(kept)))
        print(f"{rule}: {len(listed)} exceptions before, {len(kept)} now")
        for place in sorted(here - kept):
            broken = True
            print(f"  not added: {place}\n    {text.sentence}")
    for line in drop_unmatched_imports():
        print(f"imports: removed {line}")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
