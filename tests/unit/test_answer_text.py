"""The ready-made JSON text of /query says exactly what the answer built from objects says."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from schemas.registry import EngineRecord
from services.router.answer_text import AnswerText
from services.router.answers import query_answer
from services.router.index.port import NOTHING, Coverage
from services.router.standing import Standings

names = st.text(st.sampled_from('ab%"\\é{}'), min_size=1, max_size=5)
coverages = st.one_of(
    st.just(NOTHING),
    st.builds(Coverage, *[st.integers(0, 3) for _ in range(5)]),
)


@given(
    engines=st.lists(st.tuples(names, st.integers(0, 2)), max_size=6, unique=True),
    tenant=names,
    block_size=st.integers(1, 128),
    data=st.data(),
)
def test_text_and_objects_say_the_same(
    engines: list[tuple[str, int]], tenant: str, block_size: int, data: st.DataObject
) -> None:
    records = tuple(EngineRecord(instance_id=n, dp_rank=r, model="m", block_size=4) for n, r in engines)
    standings, text = Standings(15.0), AnswerText()
    for _ in range(2):
        found = [data.draw(coverages) for _ in records]
        rendered = text.render(tenant, records, found, block_size, standings)
        assert orjson.loads(rendered) == query_answer(tenant, records, found, block_size, standings)


def test_another_view_of_registry_or_streams_makes_the_text_anew() -> None:
    standings, text = Standings(15.0), AnswerText()
    one = (EngineRecord(instance_id="a", model="m", block_size=4),)
    two = (*one, EngineRecord(instance_id="b", model="m", block_size=4))
    assert list(orjson.loads(text.render("t", one, [NOTHING], 4, standings))["t"]) == ["a"]
    assert list(orjson.loads(text.render("t", two, [NOTHING, NOTHING], 4, standings))["t"]) == ["a", "b"]
    standings.version += 1
    assert list(orjson.loads(text.render("t", two, [NOTHING, NOTHING], 4, standings))["t"]) == ["a", "b"]
