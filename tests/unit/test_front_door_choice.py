"""The front door's pure parts: targets, choice, load, prompts."""

from array import array
from collections import Counter
from typing import Any

import orjson
import pytest

from schemas.registry import EngineRecord
from services.coordinator.frontdoor.choice import Target, choose, served_models, targets_for
from services.coordinator.frontdoor.load import LoadAccount, Worker
from services.coordinator.frontdoor.prompts import CHAT, COMPLETIONS, TOKENIZE, RequestRefusedError, read_prompt
from services.runtime.registry_store import Registry


def engine(instance_id: str, dp_rank: int = 0, url: str | None = "", **more: Any) -> EngineRecord:
    where = f"http://{instance_id}:8000" if url == "" else url
    values = {"model": "m", "block_size": 4, **more}
    return EngineRecord(instance_id=instance_id, dp_rank=dp_rank, url=where, **values)


def registry(*records: EngineRecord) -> Registry:
    return Registry({(record.instance_id, record.dp_rank): record for record in records})


def names(targets: list[Target]) -> list[str]:
    return [target.worker.instance_id for target in targets]


def test_only_engines_with_a_url_that_take_requests_are_targets() -> None:
    known = registry(
        engine("a"),
        engine("no-url", url=None),
        engine("paused", paused=True),
        engine("decode", role="decode"),
        engine("encode", role="encode"),
        engine("prefill", role="prefill"),
        engine("other-model", model="n"),
        engine("other-tenant", tenant="t"),
        engine("adapter", lora_name="sql"),
    )
    assert names(targets_for(known, "m", "default")) == ["a", "prefill"]
    assert names(targets_for(known, "m", "t")) == ["other-tenant"]
    assert names(targets_for(known, "sql", "default")) == ["adapter"]
    assert served_models(known) == ["m", "n", "sql"]


def test_the_rank_is_named_only_where_one_url_serves_several_ranks() -> None:
    known = registry(
        engine("shared", 0, "http://s:1"), engine("shared", 1, "http://s:1"),
        engine("split", 0, "http://s:2"), engine("split", 1, "http://s:3"),
    )  # fmt: skip
    assert [target.rank_header for target in targets_for(known, "m", "default")] == [True, True, False, False]


def test_the_most_matched_tokens_win_until_running_requests_outweigh_them() -> None:
    targets = targets_for(registry(engine("a"), engine("b")), "m", "default")
    load, matched = LoadAccount(), {Worker("a", 0): 1000}

    def chosen() -> str:
        target = choose(targets, matched, load, 300)
        assert target is not None
        return target.worker.instance_id

    with load.charge(Worker("a", 0)), load.charge(Worker("a", 0)), load.charge(Worker("a", 0)):
        assert chosen() == "a"
        with load.charge(Worker("a", 0)):
            assert chosen() == "b"
        assert chosen() == "a"


def test_t33_ties_are_broken_at_random() -> None:
    targets = targets_for(registry(engine("a"), engine("b"), engine("c")), "m", "default")
    seen = Counter(target.worker.instance_id for _ in range(300) if (target := choose(targets, {}, LoadAccount(), 1)))
    assert min(seen[name] for name in "abc") > 40


def test_tried_workers_are_not_chosen_again() -> None:
    targets = targets_for(registry(engine("a"), engine("b")), "m", "default")
    target = choose(targets, {Worker("a", 0): 100}, LoadAccount(), 1, {Worker("a", 0)})
    assert target is not None
    assert target.worker.instance_id == "b"
    assert choose(targets, {}, LoadAccount(), 1, {Worker("a", 0), Worker("b", 0)}) is None


def test_a_charge_is_given_back_once_also_after_an_error() -> None:
    load = LoadAccount()

    def fail() -> None:
        with load.charge(Worker("a", 0)):
            assert load.total == 1
            raise RuntimeError("engine gone")

    with pytest.raises(RuntimeError):
        fail()
    assert (load.total, load.running(Worker("a", 0))) == (0, 0)


def prompt(path: str, **fields: Any) -> Any:
    return read_prompt(orjson.dumps({"model": "m", **fields}), path)


def test_token_ids_are_taken_as_they_are() -> None:
    assert prompt(COMPLETIONS, prompt=[1, 2, 3]).tokens == array("I", [1, 2, 3]).tobytes()
    assert prompt(COMPLETIONS, prompt=[[1, 2], [3]]).tokens == array("I", [1, 2]).tobytes()


def test_text_is_tokenised_by_the_engine_with_what_shapes_the_prompt() -> None:
    assert prompt(COMPLETIONS, prompt="hi", add_special_tokens=False).to_tokenize == {
        "model": "m",
        "prompt": "hi",
        "add_special_tokens": False,
    }
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "tool_calls": []}]
    tools, arguments = [{"type": "function"}], {"enable_thinking": False}
    found = prompt(CHAT, messages=messages, tools=tools, chat_template_kwargs=arguments, temperature=0, cache_salt="s")
    assert found.to_tokenize == {"model": "m", "messages": messages, "tools": tools, "chat_template_kwargs": arguments}
    assert found.cache_salt == "s"


def test_t29_an_image_makes_the_prefix_unknown_instead_of_equal_to_other_images() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    assert prompt(CHAT, messages=image).without_prefix == "multimodal"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, b"{"),
        (COMPLETIONS, b"[]"),
        (COMPLETIONS, b'{"prompt":"x"}'),
        (COMPLETIONS, b'{"model":"m"}'),
        (COMPLETIONS, b'{"model":"m","prompt":[]}'),
        (COMPLETIONS, b'{"model":"m","prompt":[-1]}'),
        (COMPLETIONS, b'{"model":"m","prompt":[1,"x"]}'),
        (COMPLETIONS, b'{"model":"m","prompt":"x","cache_salt":5}'),
        (CHAT, b'{"model":"m","messages":[]}'),
        (CHAT, b'{"model":"m","messages":["x"]}'),
        (TOKENIZE, b'{"prompt":"x"}'),
    ],
)
def test_a_request_that_no_engine_would_take_is_refused_with_the_field(path: str, body: bytes) -> None:
    with pytest.raises(RequestRefusedError):
        read_prompt(body, path)
