"""Collective costs against sums done by hand, and against a walk of every byte over every link."""

from itertools import product

import pytest

from tpurec.topology import collectives
from tpurec.topology.collectives import Links
from tpurec.topology.slices import SliceTopology

parse = SliceTopology.parse
UNIT = Links(bytes_per_second=1.0, hop_seconds=0.0, launch_seconds=0.0)


def busiest_link_by_walking(dims, closed):
    """Send 1 / n of a byte from every chip to every chip along dimension after dimension; load of the busiest link."""
    load = {}
    chips = list(product(*map(range, dims)))
    for source, target in product(chips, chips):
        at = list(source)
        for dim, extent in enumerate(dims):
            ahead = (target[dim] - at[dim]) % extent
            back = extent - ahead
            ways = [(1, ahead, 1.0)] if not closed[dim] else []
            if not closed[dim]:
                gap = target[dim] - at[dim]
                ways = [(1 if gap > 0 else -1, abs(gap), 1.0)]
            elif ahead * 2 == extent:
                ways = [(1, ahead, 0.5), (-1, back, 0.5)]  # both ways are equally short
            else:
                ways = [(1, ahead, 1.0)] if ahead < back else [(-1, back, 1.0)]
            for step, hops, share in ways:
                here = list(at)
                for _ in range(hops):
                    key = (*here, dim, step)
                    load[key] = load.get(key, 0.0) + share / len(chips)
                    here[dim] = (here[dim] + step) % extent
            at[dim] = target[dim]
    return max(load.values())


@pytest.mark.parametrize(
    "text", ["v6e-8", "v6e-16", "v6e-32", "v6e-256", "v5p-16", "v5p-64", "v5p-128", "v5p-256", "v5p-384"]
)
def test_all_to_all_is_the_busiest_link_of_a_full_walk(text):
    slice_ = parse(text)
    walked = busiest_link_by_walking(slice_.dims, slice_.wraparound)
    cost = collectives.all_to_all(slice_, UNIT)
    # the formula may exceed the walk only where what one chip can inject is the limit
    links = sum((2 if c else 1) for e, c in zip(slice_.dims, slice_.wraparound, strict=True) if e > 1)
    inject = (1 - 1 / slice_.num_chips) / links
    assert cost.seconds_per_byte == pytest.approx(max(walked, inject), rel=1e-9)


def test_all_to_all_by_hand():
    # 16 x 16 torus: 16 / 8 bytes per byte on the busiest link, 100 GB/s; 16 hops of 1 us and 2 us launch
    cost = collectives.all_to_all(parse("v6e-256"))
    assert cost.seconds(33_554_432) == pytest.approx(18e-6 + 2 * 33_554_432 / 100e9)
    # 4 x 4 mesh: half of each half crosses the middle: 2 * 2 / 4 = 1
    assert collectives.all_to_all(parse("v6e-16")).seconds_per_byte == pytest.approx(1 / 100e9)


def test_gather_reduce_scatter_and_all_reduce_by_hand():
    torus = parse("v5p-128")  # six links a chip at 100 GB/s, one of 64 parts is there already
    assert collectives.all_gather(torus).seconds_per_byte == pytest.approx(63 / 64 / 6 / 100e9)
    assert collectives.reduce_scatter(torus) == collectives.all_gather(torus)
    assert collectives.all_reduce(torus).seconds(1e9) == pytest.approx(2 * collectives.all_gather(torus).seconds(1e9))
    mesh = parse("v6e-16")  # a corner chip has two links
    assert collectives.all_gather(mesh).seconds_per_byte == pytest.approx(15 / 16 / 2 / 100e9)
    ring = collectives.reduce_scatter(torus, dims=(2,))  # one ring of four: two links
    assert ring.seconds_per_byte == pytest.approx(3 / 4 / 2 / 100e9)
    assert ring.latency_seconds == pytest.approx(2e-6 + 2 * 1e-6)
    host = collectives.block_reduce_scatter(torus)  # 2 x 2 chips, no ring
    assert host.seconds_per_byte == pytest.approx(3 / 4 / 2 / 100e9)


def test_both_ranks_of_a_7x_chip_share_its_links():
    one, two = parse("v5p-128"), parse("tpu7x:4x4x4")
    assert collectives.all_to_all(two, UNIT).seconds_per_byte == 2 * collectives.all_to_all(one, UNIT).seconds_per_byte
    assert collectives.all_to_all(parse("tpu7x:1x1x1"), UNIT).seconds_per_byte == 0  # inside the chip


@pytest.mark.parametrize("make", [collectives.all_to_all, collectives.all_gather, collectives.all_reduce])
def test_one_rank_pays_nothing(make):
    assert make(parse("v6e-1")).seconds(1e9) == 0
    assert make(parse("cpu-1")).seconds(1e9) == 0


def test_cpu_ranks_send_message_after_message():
    cost = collectives.all_to_all(parse("cpu-4"), Links(1e9, 1e-4, 1e-4))
    assert cost.latency_seconds == pytest.approx(4e-4)  # launch and three messages
    assert cost.seconds_per_byte == pytest.approx(0.75e-9)
