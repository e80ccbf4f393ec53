"""One configuration, validated as a whole; errors name the key and the fix."""

from pathlib import Path

import pytest

from services.runtime.config import ConfigError, load_config


def write(folder: Path, text: str) -> str:
    path = folder / "kvroute.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_work_without_a_file() -> None:
    config = load_config(environment={})
    assert config.router.port == 13333
    assert config.nats.servers() == ["nats://127.0.0.1:4222"]


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "nats:\n  url: nats://file:4222\nrouter:\n  port: 1\n")
    config = load_config(path, {"KVROUTE_NATS__URL": "nats://a:1, nats://b:2"})
    assert config.nats.servers() == ["nats://a:1", "nats://b:2"]
    assert config.router.port == 1


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    assert load_config(environment={"KVROUTE_CONFIG": write(tmp_path, "router: {port: 7}")}).router.port == 7


def test_bs_06_an_unknown_key_is_refused_by_name_with_the_nearest_known_one(tmp_path: Path) -> None:
    path = write(tmp_path, "router:\n  prot: 5\nnats:\n  streamMaxAge: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert "unknown key router.prot, did you mean port?" in str(caught.value)
    assert "unknown key nats.streamMaxAge, did you mean stream_max_age?" in str(caught.value)
    assert path in str(caught.value)


def test_an_unknown_section_and_an_unknown_variable_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment variable KVROUTE_ROUTER__PORTT: unknown key router\.portt"):
        load_config(environment={"KVROUTE_ROUTER__PORTT": "5"})
    with pytest.raises(ConfigError, match="unknown key routr, did you mean router"):
        load_config(environment={"KVROUTE_ROUTR__PORT": "5"})


def test_all_errors_come_at_once_with_their_source(tmp_path: Path) -> None:
    path = write(tmp_path, "router:\n  port: many\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {"KVROUTE_MATCHER__PORT": "70000"})
    lines = str(caught.value).splitlines()
    assert any(line.startswith(f"{path}: router.port:") for line in lines)
    assert any(line.startswith("environment variable KVROUTE_MATCHER__PORT: matcher.port:") for line in lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [("router: [", "is not valid YAML"), ("- 1", "must be a mapping of sections"), ("router: 5", "router")],
)
def test_a_broken_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), {})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/kvroute.yaml: cannot be read"):
        load_config("/nowhere/kvroute.yaml", {})


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "router:\n"), {}).router.port == 13333


def test_secrets_do_not_show_in_representations() -> None:
    config = load_config(environment={"KVROUTE_NATS__TOKEN": "s3cret", "KVROUTE_REDIS__URL": "redis://u:s3cret@h/0"})
    assert "s3cret" not in repr(config)
    assert config.nats.token is not None
    assert config.nats.token.get_secret_value() == "s3cret"


def test_what_kubernetes_says_of_services_is_not_taken_for_settings() -> None:
    config = load_config(
        environment={
            "KVROUTE_ROUTER_SERVICE_HOST": "10.0.0.1",
            "KVROUTE_ROUTER_SERVICE_PORT_HTTP": "13333",
            "KVROUTE_ROUTER_PORT": "tcp://10.0.0.1:13333",
            "KVROUTE_ROUTER_PORT_13333_TCP_ADDR": "10.0.0.1",
        }
    )
    assert config.router.port == 13333


@pytest.mark.parametrize("url", ["", " , ", "http://host:4222", "nats://", "nats://host:port", "nats://u:s3cret@:4222"])
def test_a_nats_url_that_can_never_work_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"nats\.url: .*write nats://host:4222") as caught:
        load_config(environment={"KVROUTE_NATS__URL": url})
    assert "s3cret" not in str(caught.value)


def test_a_password_in_the_nats_url_does_not_show_in_representations() -> None:
    assert "s3cret" not in repr(load_config(environment={"KVROUTE_NATS__URL": "nats://me:s3cret@host:4222"}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("router: {port: 1}\nmatcher: {port: 2}\nrouter: {port: 3}", "key router in line 3 stands in line 1 already"),
        ("router:\n  port: 1\n  index: plain\n  port: 2", "key port in line 4 stands in line 2 already"),
    ],
)
def test_bs_06_a_key_that_stands_twice_is_refused_instead_of_the_last_one_winning(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), {})


def test_merged_yaml_keys_may_be_overridden(tmp_path: Path) -> None:
    text = "matcher: &ports\n  port: 5\nrouter:\n  <<: *ports\n  host: 127.0.0.1\n"
    config = load_config(write(tmp_path, text), {})
    assert (config.router.port, config.router.host) == (5, "127.0.0.1")


@pytest.mark.parametrize(
    "url", ["", "http://host:6379", "redis://", "host:6379", "redis://host:port/0", "mysql://u:s3cret@host"]
)
def test_a_redis_url_that_can_never_work_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url: is not a Redis server; write redis://host:6379/0") as caught:
        load_config(environment={"KVROUTE_REDIS__URL": url})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("sentinels", ["[]", '["redis-0"]', '["redis-0:port"]', '["redis-0:0"]', '[":26379"]'])
def test_sentinel_mode_needs_sentinels_with_ports(sentinels: str) -> None:
    with pytest.raises(ConfigError, match=r"redis.*host:port"):
        load_config(environment={"KVROUTE_REDIS__MODE": "sentinel", "KVROUTE_REDIS__SENTINELS": sentinels})


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan"])
@pytest.mark.parametrize("key", ["matcher: {pending_ttl", "runtime: {shutdown_grace", "nats: {connect_timeout"])
def test_times_without_an_end_are_refused(tmp_path: Path, key: str, number: str) -> None:
    with pytest.raises(ConfigError, match=r"finite number|greater than 0"):
        load_config(write(tmp_path, f"{key}: {number}}}"), {})


def test_waits_in_the_wrong_order_and_sections_of_another_shape_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reconnect_min 5\.0 is above reconnect_max 1\.0"):
        load_config(write(tmp_path, "ingest: {reconnect_min: 5, reconnect_max: 1}"), {})
    with pytest.raises(ConfigError, match="router: must be a mapping of keys and values"):
        load_config(write(tmp_path, "router: 5"), {})


def test_po_09_publishers_are_not_doubted_before_ingest_has_spoken_again() -> None:
    with pytest.raises(
        ConfigError, match=r"configuration: router\.stale_after 3\.0 is below nats\.stream_state_ttl 15"
    ):
        load_config(environment={"KVROUTE_ROUTER__STALE_AFTER": "3"})
    load_config(environment={"KVROUTE_ROUTER__STALE_AFTER": "3", "KVROUTE_NATS__STREAM_STATE_TTL": "3"})


def test_ha_03_a_hash_seed_is_no_setting_as_keys_do_not_depend_on_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key router\.hash_seed"):
        load_config(write(tmp_path, "router: {hash_seed: 0}"), {})
