"""Registration requests: what becomes of every field, in both spellings, and how bad bodies are refused."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.blocks import Tier
from schemas.http import REGISTRATION_PROPERTIES, REGISTRATION_REQUIRED
from schemas.registration import (
    REGISTRATION_FIELDS,
    RegistrationError,
    parse_registration,
    parse_unregistration,
)
from schemas.registry import EngineRecord, PoolRecord, dump_record, load_record

ENGINE: dict[str, Any] = {
    "instance_id": "vllm-prefill-1",
    "type": "vLLM",
    "modelname": "qwen",
    "block_size": 128,
    "dp_rank": 0,
    "store_backend": "Memcache",
    "medium_endpoints": {"npu": "tcp://10.0.0.5:5557"},
    "replay_endpoint": "tcp://10.0.0.5:6667",
}
POOL: dict[str, Any] = {
    "instance_id": "memcache-pool",
    "type": "vLLM",
    "modelname": "qwen",
    "block_size": 128,
    "dp_rank": 0,
    "store_backend": "memcache",
    "endpoint": "tcp://kvs-master:5557",
}
MOONCAKE: dict[str, Any] = {
    "endpoint": "tcp://10.0.0.5:5557",
    "type": "vLLM",
    "modelname": "qwen",
    "instance_id": "mc-1",
    "block_size": 16,
    "dp_rank": 3,
}


def engine(**changes: Any) -> EngineRecord:
    record = parse_registration({**ENGINE, **changes}).record
    assert isinstance(record, EngineRecord)
    return record


def pool(pool_service: str | None = None, **changes: Any) -> PoolRecord:
    record = parse_registration({**POOL, **changes}, pool_service).record
    assert isinstance(record, PoolRecord)
    return record


def refused_fields(body: object, pool_service: str | None = None) -> list[str]:
    with pytest.raises(RegistrationError) as refused:
        parse_registration(body, pool_service)
    assert all(problem.problem and problem.fix for problem in refused.value.problems)
    return [problem.field for problem in refused.value.problems]


class TestConductorSpelling:
    def test_every_field_arrives_in_the_record(self) -> None:
        record = engine(tenant_id="t", node_id="node-7", role="P", url="http://10.0.0.5:8000/", counted=False)
        assert record == EngineRecord(
            instance_id="vllm-prefill-1",
            model="qwen",
            tenant="t",
            block_size=128,
            dp_rank=0,
            engine_type="vLLM",
            store_backend="Memcache",
            endpoints={Tier.NPU: "tcp://10.0.0.5:5557"},
            replay_endpoint="tcp://10.0.0.5:6667",
            backend_ids=("10.0.0.5", "node-7"),
            node_id="node-7",
            url="http://10.0.0.5:8000",
            role="prefill",
            counted=False,
        )

    def test_without_optional_fields_the_defaults_of_the_replaced_service_hold(self) -> None:
        record = parse_registration(
            {**ENGINE, "store_backend": None, "replay_endpoint": None, "tenant_id": None}
        ).record
        assert isinstance(record, EngineRecord)
        assert (record.store_backend, record.tenant, record.replay_endpoint) == ("Mooncake", "default", None)

    def test_no_endpoint_at_all_is_an_engine_whose_events_come_over_http(self) -> None:
        record = engine(medium_endpoints={}, replay_endpoint=None)
        assert (record.endpoints, record.backend_ids) == ({}, ())

    def test_a_pool_is_named_by_backend_and_endpoint(self) -> None:
        assert pool().endpoint == "tcp://kvs-master:5557"
        assert pool(store_backend="MOONCAKE").store_backend == "Mooncake"

    def test_medium_endpoints_make_it_an_engine_and_endpoint_is_ignored_aloud(self) -> None:
        registration = parse_registration({**ENGINE, "endpoint": "tcp://10.9.9.9:1"})
        assert isinstance(registration.record, EngineRecord)
        assert registration.record.endpoints == {Tier.NPU: "tcp://10.0.0.5:5557"}
        assert "endpoint is ignored" in registration.warnings[0]

    def test_a_yuanrong_node_has_a_publisher_per_medium_and_only_the_engines_port_moves_with_the_rank(self) -> None:
        media = {"XPU": "tcp://*:5557", "cpu": "tcp://*:31601", "SSD": "tcp://*:31602"}
        record = engine(store_backend="yuanrong", medium_endpoints=media, dp_rank=2, host="10.0.0.6")
        assert record.endpoints == {
            Tier.NPU: "tcp://10.0.0.6:5559",
            Tier.CPU: "tcp://10.0.0.6:31601",
            Tier.DISK: "tcp://10.0.0.6:31602",
        }

    @pytest.mark.parametrize("name", ["memcache", "MEMCACHE", " Memcache "])
    def test_backend_and_engine_names_are_case_insensitive(self, name: str) -> None:
        record = engine(store_backend=name, type="VLLM")
        assert (record.store_backend, record.engine_type) == ("Memcache", "vLLM")

    def test_an_unknown_backend_is_handled_as_yuanrong_with_a_warning(self) -> None:
        registration = parse_registration({**ENGINE, "store_backend": "redisish"})
        assert registration.record.store_backend == "YuanRong"
        assert "redisish" in registration.warnings[0]

    def test_an_unknown_engine_type_is_kept_as_it_is(self) -> None:
        assert engine(type="MyEngine").engine_type == "MyEngine"

    def test_unknown_fields_are_ignored_aloud(self) -> None:
        assert "blockSize" in parse_registration({**ENGINE, "blockSize": 64}).warnings[0]


class TestMooncakeSpelling:
    def test_endpoint_without_a_backend_is_an_engine(self) -> None:
        body = {**MOONCAKE, "lora_name": "sql", "additionalsalt": "w8a8", "replay_endpoint": "", "tenant_id": "t"}
        record = parse_registration(body).record
        assert isinstance(record, EngineRecord)
        assert record.endpoints == {Tier.NPU: "tcp://10.0.0.5:5557"}
        assert (record.lora_name, record.additional_salt, record.tenant) == ("sql", "w8a8", "t")
        assert (record.dp_rank, record.replay_endpoint, record.registered_with) == (3, None, "mooncake")

    @pytest.mark.parametrize("engine_type", ["vLLM", "sglang", "SGLang"])
    def test_every_engine_type_is_an_engine(self, engine_type: str) -> None:
        assert isinstance(parse_registration({**MOONCAKE, "type": engine_type}).record, EngineRecord)

    def test_type_mooncake_is_the_pool(self) -> None:
        record = parse_registration({**MOONCAKE, "type": "mooncake"}).record
        assert isinstance(record, PoolRecord)
        assert (record.store_backend, record.registered_with) == ("Mooncake", "mooncake")

    @pytest.mark.parametrize("kind", [EngineRecord, PoolRecord])
    def test_kind_decides_where_it_is_given(self, kind: type) -> None:
        name = "engine" if kind is EngineRecord else "pool"
        assert isinstance(parse_registration({**MOONCAKE, "kind": name}).record, kind)
        assert isinstance(parse_registration({**POOL, "kind": name}).record, kind)


class TestWildcards:
    def test_an_engines_wildcard_becomes_its_host_and_the_port_moves_with_the_rank(self) -> None:
        record = engine(
            medium_endpoints={"npu": "tcp://*:5557"}, replay_endpoint="tcp://*:6667", host="10.0.0.9", dp_rank=3
        )
        assert record.endpoints == {Tier.NPU: "tcp://10.0.0.9:5560"}
        assert record.replay_endpoint == "tcp://10.0.0.9:6670"

    @pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "[::]"])
    def test_ip_03_another_endpoint_tells_the_host(self, wildcard: str) -> None:
        record = engine(medium_endpoints={"npu": f"tcp://{wildcard}:5557"}, replay_endpoint="tcp://10.0.0.5:6667")
        assert record.endpoints == {Tier.NPU: "tcp://10.0.0.5:5557"}

    def test_the_engines_url_tells_the_host(self) -> None:
        record = engine(medium_endpoints={"npu": "tcp://*:5557"}, replay_endpoint=None, url="http://[fd00::5]:8000")
        assert record.endpoints == {Tier.NPU: "tcp://[fd00::5]:5557"}

    @pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "[::]"])
    def test_ip_03_without_any_host_it_is_refused(self, wildcard: str) -> None:
        body = {**MOONCAKE, "endpoint": f"tcp://{wildcard}:5557"}
        assert refused_fields(body) == ["endpoint"]

    def test_a_concrete_address_is_taken_as_it_is_whatever_the_rank(self) -> None:
        assert engine(dp_rank=3).endpoints == {Tier.NPU: "tcp://10.0.0.5:5557"}

    def test_a_port_that_the_rank_moves_out_of_range_is_refused(self) -> None:
        body = {**ENGINE, "medium_endpoints": {"npu": "tcp://*:65535"}, "dp_rank": 1}
        assert refused_fields(body) == ["medium_endpoints.npu"]

    @pytest.mark.parametrize(
        ("service", "url"),
        [
            ("kvs-master", "tcp://kvs-master:5557"),
            ("fd00::9", "tcp://[fd00::9]:5557"),
            ("[fd00::9]", "tcp://[fd00::9]:5557"),
        ],
    )
    def test_a_pools_wildcard_is_the_kvs_master_service(self, service: str, url: str) -> None:
        assert pool(service, endpoint="tcp://*:5557").endpoint == url

    @pytest.mark.parametrize("service", [None, "", "0.0.0.0"])
    def test_a_pools_wildcard_without_the_service_is_refused_and_names_the_variable(self, service: str | None) -> None:
        with pytest.raises(RegistrationError, match="KVS_MASTER_SERVICE"):
            parse_registration({**POOL, "endpoint": "tcp://*:5557"}, service)

    def test_ip_01_host_and_port_alone_name_the_publisher(self) -> None:
        body = {**MOONCAKE, "host": "fe80::1%lo", "port": 5559, "dp_rank": 0}
        del body["endpoint"]
        record = parse_registration(body).record
        assert isinstance(record, EngineRecord)
        assert record.endpoints == {Tier.NPU: "tcp://[fe80::1%lo]:5559"}

    def test_ip_01_the_rank_moves_the_port_and_nothing_else(self) -> None:
        body = {**MOONCAKE, "host": "::1", "port": 5557, "dp_rank": 2, "url": "http://*:8000"}
        del body["endpoint"]
        record = parse_registration(body).record
        assert isinstance(record, EngineRecord)
        assert record.endpoints == {Tier.NPU: "tcp://[::1]:5559"}
        assert record.url == "http://[::1]:8000"


class TestLocalityAndOwnTiers:
    def test_the_npu_endpoints_host_and_the_node_are_what_is_local(self) -> None:
        assert engine(node_id="node-1").backend_ids == ("10.0.0.5", "node-1")

    def test_backend_ids_replace_the_default_in_one_spelling_each(self) -> None:
        record = engine(backend_ids=["FD00::0005", "fd00::5", "host-a"])
        assert record.backend_ids == ("fd00::5", "host-a")

    def test_an_engine_without_a_pool_proves_its_cpu_tier_itself(self) -> None:
        assert engine(store_backend="none").own_tiers == (Tier.CPU,)
        assert engine(store_backend="None", offload=False).own_tiers == ()
        assert engine(offload=True).own_tiers == (Tier.CPU,)
        assert engine().own_tiers == ()

    def test_own_tiers_can_be_named(self) -> None:
        assert engine(own_tiers=["disk", "DRAM"]).own_tiers == (Tier.CPU, Tier.DISK)
        assert refused_fields({**ENGINE, "own_tiers": ["npu"]}) == ["own_tiers"]


class TestRefusals:
    def test_ht_04_every_problem_is_named_at_once(self) -> None:
        body = {"instance_id": "", "endpoint": "tcp://127.0.0.1", "dp_size": -1, "block_size": 0, "dp_rank": -1}
        assert set(refused_fields(body)) == {
            *("instance_id", "type", "modelname", "block_size", "dp_rank", "dp_size", "endpoint"),
        }

    @pytest.mark.parametrize("field", ["instance_id", "type", "modelname", "block_size", "dp_rank"])
    @pytest.mark.parametrize("spelling", [ENGINE, POOL, MOONCAKE])
    def test_a_missing_required_field_is_named(self, spelling: dict[str, Any], field: str) -> None:
        body = {name: value for name, value in spelling.items() if name != field}
        assert refused_fields(body) == [field]

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("instance_id", 7),
            ("instance_id", "a\nb"),
            ("instance_id", "x" * 513),
            ("modelname", "模" * 100),
            ("modelname", ["m"]),
            ("type", ""),
            ("block_size", 0),
            ("block_size", 4097),
            ("block_size", "128"),
            ("block_size", 128.0),
            ("block_size", True),
            ("dp_rank", -1),
            ("dp_rank", 65_536),
            ("dp_rank", False),
            ("tenant_id", 5),
            ("tenant_id", "t" * 600),
            ("store_backend", 1),
            ("medium_endpoints", ["tcp://h:1"]),
            ("medium_endpoints", {"gpuu": "tcp://10.0.0.5:5557"}),
            ("medium_endpoints", {"npu": 5557}),
            ("medium_endpoints", {"npu": "10.0.0.5:5557"}),
            ("medium_endpoints", {"npu": "tcp://a:1", "gpu": "tcp://b:1"}),
            ("replay_endpoint", "http://h:1"),
            ("host", "0.0.0.0"),
            ("host", "bad host"),
            ("url", "ftp://h"),
            ("role", "driver"),
            ("kind", "engines"),
            ("offload", "yes"),
            ("counted", 1),
            ("backend_ids", "10.0.0.5"),
            ("backend_ids", [""]),
            ("backend_ids", ["a"] * 65),
            ("own_tiers", ["tape"]),
        ],
    )
    def test_a_bad_value_is_refused_and_its_field_named(self, field: str, value: Any) -> None:
        assert {name.split(".")[0] for name in refused_fields({**ENGINE, field: value})} == {field}

    @pytest.mark.parametrize("body", [None, [], "x", 5])
    def test_a_body_that_is_no_object_is_refused(self, body: object) -> None:
        assert refused_fields(body) == ["body"]

    def test_an_empty_endpoint_alone_is_refused(self) -> None:
        assert refused_fields({**MOONCAKE, "endpoint": ""}) == ["endpoint"]

    def test_dp_03_rank_0_is_kept_as_0(self) -> None:
        record = engine(dp_rank=0)
        assert record.dp_rank == 0
        assert b'"dp_rank":0' in dump_record(record)

    @given(
        st.dictionaries(
            st.sampled_from([*ENGINE, *POOL, *MOONCAKE, "host", "port", "url", "backend_ids", "own_tiers", "kind"]),
            st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.lists(st.text(max_size=3)),
        )
    )
    def test_no_body_does_anything_but_become_a_record_or_be_refused(self, changes: dict[str, Any]) -> None:
        with contextlib.suppress(RegistrationError):
            record = parse_registration({**ENGINE, **changes}).record
            assert load_record(dump_record(record)) == record


class TestUnregistration:
    def test_it_needs_the_instance_and_the_rank(self) -> None:
        request = parse_unregistration({**ENGINE, "tenant_id": "t"})
        assert (request.instance_id, request.dp_rank, request.model, request.tenant) == (
            *("vllm-prefill-1", 0, "qwen", "t"),
        )

    def test_what_is_missing_is_named(self) -> None:
        with pytest.raises(RegistrationError) as refused:
            parse_unregistration({})
        assert [problem.field for problem in refused.value.problems] == ["instance_id", "dp_rank"]


def test_the_published_schema_names_exactly_the_fields_that_are_read() -> None:
    assert set(REGISTRATION_PROPERTIES) == REGISTRATION_FIELDS
    for field in REGISTRATION_REQUIRED:
        assert refused_fields({name: value for name, value in ENGINE.items() if name != field}) == [field]
