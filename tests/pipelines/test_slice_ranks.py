"""Ranks, hosts and devices of slices, and what a cluster is asked for: arithmetic, without Ray."""

import pytest

from pipelines.ray_slice import (
    POD_TYPE,
    SLICE_NAME,
    TOPOLOGY,
    SliceRequest,
    check_cluster,
    check_devices_per_chip,
)
from pipelines.slice_ranks import Place, on_devices, place_of, ranks_of_workers
from tpurec.errors import ConfigError, TpurecError
from tpurec.sharding.planner import plan
from tpurec.sharding.tables import FeatureSpec, TableSpec
from tpurec.topology.slices import SliceTopology

SLICES = ["v6e-16", "v6e-8", "v5e-32", "v5p-16", "tpu7x:2x2x2", "v6e-64"]


@pytest.mark.parametrize("name", SLICES)
def test_every_rank_of_a_plan_has_a_device_of_its_own_on_the_host_that_its_coordinates_are_in(name):
    topology = SliceTopology.parse(name)
    places = [place_of(topology, rank) for rank in range(topology.num_ranks)]
    assert len(set(places)) == topology.num_ranks
    assert {place.host for place in places} == set(range(topology.num_hosts))
    assert all(0 <= place.device < topology.ranks_per_host for place in places)
    for rank, place in enumerate(places):
        corner = [at // part for at, part in zip(topology.coordinates(rank), topology.host_dims, strict=True)]
        hosts = [extent // part for extent, part in zip(topology.dims, topology.host_dims, strict=True)]
        number, stride = 0, 1
        for at, extent in zip(corner, hosts, strict=True):  # torch_tpu's rule: x fastest
            number, stride = number + at * stride, stride * extent
        assert place.host == number


def test_workers_in_any_order_are_ranked_by_where_they_run():
    topology = SliceTopology.parse("v5p-16")
    found = [Place(host, device) for device in (2, 0, 3, 1) for host in (1, 0)]
    assert ranks_of_workers(topology, found) == [6, 2, 4, 0, 7, 3, 5, 1]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([Place(0, device) for device in range(4)] * 2, r"no worker runs on host 1, device 0"),
        ([Place(host, device) for host in (0, 7) for device in range(4)], r"host 7, device 0, which v5p-16 lacks"),
        ([Place(0, 0)], r"v5p-16 \(2 hosts with 4 devices each\): no worker runs on host 0, device 1"),
    ],
)
def test_workers_that_do_not_cover_the_slice_are_refused(found, message):
    with pytest.raises(TpurecError, match=message):
        ranks_of_workers(SliceTopology.parse("v5p-16"), found)


def test_a_plan_on_devices_gives_each_chip_the_rows_that_the_plan_gives_its_coordinates():
    table = TableSpec("t", 1000, 16, (FeatureSpec("f"),), pin="row_wise")
    given = plan([table], "v6e-16", 64)
    moved = on_devices(given)
    topology = given.topology
    for rank in range(16):
        place = place_of(topology, rank)
        process = place.host * topology.ranks_per_host + place.device
        rows = [row for row in range(1000) if given.table("t").shards[0].owner(row) == rank]
        assert rows == [row for row in range(1000) if moved.table("t").shards[0].owner(row) == process]
    assert on_devices(plan([table], "cpu-4", 64)) == plan([table], "cpu-4", 64)


def nodes(count: int, tpus: int = 4, pod_type: str = "v6e-16", topology: str = "4x4", name: str = "s", alive=True):
    labels = {SLICE_NAME: name, POD_TYPE: pod_type, TOPOLOGY: topology}
    return [
        {"Alive": alive, "NodeID": f"{number:08d}", "Resources": {"TPU": tpus, "CPU": 8}, "Labels": labels}
        for number in range(count)
    ]


CPU_NODE = {"Alive": True, "NodeID": "c", "Resources": {"CPU": 8}, "Labels": {}}


def test_a_cluster_with_the_slice_among_others_is_accepted():
    check_cluster(SliceRequest(SliceTopology.parse("v6e-16")), [CPU_NODE, *nodes(4), *nodes(1, 8, "v6e-8", "2x4", "t")])
    check_cluster(SliceRequest(SliceTopology.parse("v5p-16")), nodes(2, 4, "v5p-16", "2x2x2"))


@pytest.mark.parametrize(
    ("there", "has"),
    [
        ([CPU_NODE], "it has no node with a TPU"),
        (nodes(3), r"it has slice 's' \(v6e-16, 4x4\): 3 nodes with 12 TPUs in all"),
        (nodes(4, alive=False), "it has no node with a TPU"),
        (nodes(4, 4, "v6e-16", "2x8"), r"slice 's' \(v6e-16, 2x8\)"),
        (nodes(2) + nodes(2, name="t"), r"slice 's' .*: 2 nodes with 8 TPUs in all; slice 't'"),
    ],
)
def test_a_cluster_without_the_slice_is_told_what_is_wanted_and_what_it_has(there, has):
    wanted = r"lacks the slice v6e-16: wanted are 4 nodes of one slice with 4 TPUs each, ray.io/tpu-pod-type = 'v6e-16'"
    with pytest.raises(TpurecError, match=f"{wanted}.*{has}"):
        check_cluster(SliceRequest(SliceTopology.parse("v6e-16")), there)


def test_chips_must_not_be_counted_where_devices_are_meant():
    with pytest.raises(ConfigError, match="Set RAY_TPU_RESOURCE_PER_CHIP=2 on every node"):
        check_devices_per_chip(SliceTopology.parse("tpu7x:2x2x2"), 1)
    check_devices_per_chip(SliceTopology.parse("tpu7x:2x2x2"), 2)
