"""Faults reported from the field around ranks, addresses and registrations, replayed through HTTP and real sockets."""

import socket
from typing import Any

import pytest

from tests.e2e.reported_site import BLOCK, Site, gpu_store, tokens
from tests.e2e.support import Counts, eventually


def registration(site: Site, who: str, **changes: Any) -> dict[str, Any]:
    body = {"instance_id": site.name(who), "type": "vLLM", "modelname": site.model, "block_size": BLOCK, "dp_rank": 0}
    return body | changes


async def post(site: Site, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    answer = await site.router.http.post(path, json=body)
    return answer.status_code, answer.json()


async def test_dp_01_ranks_without_a_publisher_are_shown_as_never_connected(site: Site) -> None:
    await site.engine("A")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, and nobody listens
        silent = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        await site.router.register_body(
            registration(site, "A", dp_rank=1, medium_endpoints={"npu": silent}, store_backend="None")
        )
        site.publish("A", gpu_store([11], tokens(1)))
        assert await site.npu("A", tokens(1)) == 1

        async def attempted() -> bool:
            return bool((await site.pipeline.publisher(silent))["connection_attempts"])

        await eventually(attempted, True)
        status = await site.pipeline.publisher(silent)
        assert (status["connected"], status["ever_connected"], status["state"]) == (False, False, "unknown")
        workers = (await site.router.http.get("/workers")).json()["workers"]
        (ours,) = [worker for worker in workers if worker["instance_id"] == site.name("A")]
        assert ours["endpoints"]["1"]["last_event_at"] is None
        assert ours["endpoints"]["0"]["last_event_at"] is not None


async def test_dp_02_the_rank_is_that_of_the_socket_and_a_conflict_is_counted(site: Site) -> None:
    for rank in range(3):
        await site.engine("A", dp_rank=rank, key=f"rank {rank}")
    site.publish("rank 0", gpu_store([11], tokens(1)))
    site.publish("rank 1", gpu_store([12], tokens(1, first=5)))
    site.publish("rank 2", gpu_store([13], tokens(1, first=9)), dp_rank=None)
    await site.settle()
    for rank in range(3):
        held = [await site.counts("A", tokens(1, first=first), dp_rank=rank) for first in (1, 5, 9)]
        assert [counts.npu for counts in held] == [int(rank == place) for place in range(3)]
    assert [(await site.status(f"rank {rank}"))["rank_conflicts"] for rank in range(3)] == [0, 1, 0]


async def test_dp_03_rank_0_is_a_rank_and_one_publisher_belongs_to_one_instance(site: Site) -> None:
    await site.engine("A")
    endpoint = site.publishers["A"].endpoint
    workers = (await site.router.http.get("/workers")).json()["workers"]
    (ours,) = [worker for worker in workers if worker["instance_id"] == site.name("A")]
    assert ours["endpoints"]["0"]["dp_rank"] == 0
    status, body = await post(site, "/register", registration(site, "B", endpoint=endpoint, store_backend="None"))
    assert (status, body["code"]) == (409, "endpoint_taken")
    assert endpoint in body["error"]
    assert site.name("A") in body["error"]
    status, _ = await post(site, "/unregister", registration(site, "B"))
    assert status == 404


async def test_dp_06_two_instances_on_one_host_keep_their_hits(site: Site) -> None:
    await site.engine("A", url="http://127.0.0.1:8000", host="127.0.0.1")
    await site.engine("B", url="http://127.0.0.1:8001", host="127.0.0.1")
    site.publish("A", gpu_store([11], tokens(1)))
    assert (await site.npu("A", tokens(1)), await site.npu("B", tokens(1))) == (1, 0)


async def test_t17_a_name_that_moves_to_a_new_pod_inherits_nothing_and_the_old_pod_is_not_heard(site: Site) -> None:
    await site.engine("A")
    site.publish("A", gpu_store([11], tokens(1)))
    assert await site.npu("A", tokens(1)) == 1
    old = site.publishers.pop("A")
    await site.engine("A")

    async def hits() -> Counts:
        return await site.counts("A", tokens(1))

    await eventually(hits, Counts())
    site.publishers["old"] = old
    site.publish("old", gpu_store([11], tokens(1)))
    del site.publishers["old"]
    site.publish("A", gpu_store([12], tokens(1, first=5)))
    assert await site.npu("A", tokens(1, first=5)) == 1
    assert await hits() == Counts()
    await old.close()


async def test_t16_events_of_an_unregistered_engine_bring_nothing_back(site: Site) -> None:
    await site.engine("A")
    await site.engine("B")
    for number in range(200):
        site.publish("A", gpu_store([number + 1], tokens(1, first=number)))
    assert (await post(site, "/unregister", registration(site, "A")))[0] == 200
    site.publish("A", gpu_store([999], tokens(1)))
    site.publish("B", gpu_store([1], tokens(1)))
    gone = site.publishers.pop("A")
    assert await site.npu("B", tokens(1)) == 1
    answer = await site.router.query(site.model, BLOCK, tokens(1))
    assert list(answer) == [site.name("B")]
    await site.router.register_body(registration(site, "A", endpoint=gone.endpoint, store_backend="None"))
    assert await site.counts("A", tokens(1)) == Counts()
    await gone.close()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"instance_id": "", "endpoint": "tcp://127.0.0.1"}, "instance_id"),
        ({"endpoint": "tcp://127.0.0.1"}, "endpoint"),
        ({"dp_size": -1, "endpoint": "http://x"}, "dp_size"),
        ({"endpoint": "http://x"}, "endpoint"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, "endpoint"),
        ({"endpoint": "tcp://*:5557"}, "endpoint"),
        ({"endpoint": "tcp://[::]:5557"}, "endpoint"),
        ({"medium_endpoints": {"npu": "tcp://10.0.0.1:0"}}, "medium_endpoints.npu"),
        ({"medium_endpoints": {"npu": "tcp://10.0.0.1:70000"}}, "medium_endpoints.npu"),
    ],
)
async def test_ht_04_and_ip_03_a_bad_registration_names_its_fields_and_leaves_nothing(
    site: Site, body: dict[str, Any], field: str
) -> None:
    status, answer = await post(site, "/register", registration(site, "A") | body)
    assert status == 422
    assert field in [problem["field"] for problem in answer["problems"]]
    assert all(problem["fix"] for problem in answer["problems"])
    assert site.name("A") not in (await site.router.http.get("/workers")).text


async def test_ip_01_addresses_of_one_host_in_other_spellings_are_one_publisher(site: Site) -> None:
    def body(who: str, **changes: Any) -> dict[str, Any]:
        return registration(site, who, store_backend="None", **changes)

    await site.router.register_body(body("A", host="::1", port=5557))
    await site.router.register_body(body("A", host="::1", port=5557, dp_rank=1))
    workers = (await site.router.http.get("/workers")).json()["workers"]
    (ours,) = [worker for worker in workers if worker["instance_id"] == site.name("A")]
    found = {rank: endpoint["medium_endpoints"]["npu"] for rank, endpoint in ours["endpoints"].items()}
    assert found == {"0": "tcp://[::1]:5557", "1": "tcp://[::1]:5558"}
    status, answer = await post(site, "/register", body("B", endpoint="tcp://[0:0:0:0:0:0:0:1]:5557"))
    assert (status, answer["code"]) == (409, "endpoint_taken")
    await site.router.register_body(body("C", host="fe80::1%lo", port=5559))
    assert "tcp://[fe80::1%lo]:5559" in (await site.router.http.get("/workers")).text


async def test_bs_07_a_second_block_size_in_a_space_leaves_the_first_ones_matches_alone(site: Site) -> None:
    await site.engine("A", block_size=16)
    site.publish("A", gpu_store([11, 12], tokens(2, 16), block_size=16))
    assert await site.npu("A", tokens(2, 16), 16) == 2
    await site.engine("B", block_size=64)
    site.publish("B", gpu_store([21], tokens(1, 64), block_size=64))
    assert await site.npu("B", tokens(1, 64), 64) == 1
    assert await site.npu("A", tokens(2, 16), 16) == 2


async def test_t09_every_event_is_accounted_for_at_every_hop(site: Site) -> None:
    await site.engine("A")
    good = [gpu_store([number + 1], tokens(1, first=number)) for number in range(300)]
    for number in range(0, 300, 10):
        site.publish("A", *good[number : number + 10], {"type": "BlockMoved"}, gpu_store([b""], tokens(1)))
    site.publishers["A"].publish(b"\xc1")
    site.publishers["A"].send([b"payload"])
    await site.settle()
    assert await site.router.held(site.name("A")) == (300, 0, 0)
    status = await site.status("A")
    for tally in (status["events"], status["messages"]):
        refused, dropped = sum(tally["rejected"].values()), sum(tally["dropped"].values())
        assert tally["received"] == tally["published"] + refused + dropped
        assert tally["pending"] == 0
    assert (status["events"]["published"], status["events"]["rejected"]) == (300, {"unknown_event": 30, "bad_hash": 30})
    workers = (await site.router.http.get("/workers")).json()["workers"]
    (ours,) = [worker for worker in workers if worker["instance_id"] == site.name("A")]
    assert ours["endpoints"]["0"]["events"] == status["events"]["published"]
