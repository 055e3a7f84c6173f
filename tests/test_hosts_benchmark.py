"""The benchmark between hosts: short real runs where network namespaces can be made, skipped by name elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import hosts
from chaos.networks import why_not

NOISE = np.random.default_rng(0).integers(0, 256, (50, hosts.SAMPLE_BYTES), np.uint8)
GIGABIT = 1e9


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_stream_between_hosts_is_measured_within_the_rate_of_its_links(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """A link without its limit, or a counter of another link, would give a share that is no share."""
    monkeypatch.setattr(hosts, "WARM_S", 0.2)
    payloads = {"noise": NOISE, "zeros": np.zeros_like(NOISE)}
    link = hosts.measure(1, payloads, ("zstd",), 1, 0.4, is_shared=is_shared)
    assert 0 < link.plain[0] < 1.1 * GIGABIT
    (noise,), (zeros,) = link.runs.values()
    for run in (noise, zeros):
        assert run.producer_bits_per_s < 1.1 * GIGABIT
        assert run.server_bits_per_s < 1.1 * GIGABIT
        assert 0 < run.busy <= 1
        assert len(run.trainer_samples_per_s) == 2
    shown = hosts.shown([link])
    assert shown.startswith("One plain socket on a link of 1 Gb/s: ")
    assert [line.split("|")[2].strip() for line in shown.splitlines()[-2:]] == ["noise", "zeros"]


def test_a_share_is_of_what_a_plain_socket_carried() -> None:
    """The nominal rate is never reached, because headers and acknowledgements take a part of it."""
    run = hosts.LinkedRun(0.45 * GIGABIT, 0.9 * GIGABIT, (300.0, 301.0), 1.2, 0.8, 0.75)
    link = hosts.LinkRuns(1, (0.9 * GIGABIT, 0.5), {hosts.LinkedCase(1, "noise", "none"): [run]})
    cells = [cell.strip() for cell in hosts.shown([link]).splitlines()[-1].strip("|").split("|")]
    assert cells == ["1 Gb/s", "noise", "none", "0.50x", "1.00x", "0.90x", "300, 301", "45, 45", "1.20", "0.80", "75%"]


def test_where_no_namespace_can_be_made_the_command_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most machines of readers are such ones."""
    monkeypatch.setattr("sys.argv", ["hosts"])
    monkeypatch.setattr(hosts, "why_not", lambda: "network namespaces need root")
    with pytest.raises(SystemExit, match="network namespaces need root"):
        hosts.main()
