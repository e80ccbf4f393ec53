"""Multi-turn conversations: a few system prompts shared by many, histories that grow, pauses to think."""

import random
from dataclasses import dataclass

from kvroute.sim.rank_server import Prompt, output_tokens

VOCABULARY = 32_000


@dataclass(frozen=True)
class Shape:
    """Sizes in tokens, times in seconds. Ranges are inclusive and drawn from uniformly."""

    conversations: int = 36
    system_prompts: int = 9
    system_tokens: int = 1024
    turns: tuple[int, int] = (4, 6)
    question_tokens: tuple[int, int] = (120, 320)
    answer_tokens: int = 24
    think_seconds: tuple[float, float] = (0.6, 1.4)
    start_window_seconds: float = 7.0


@dataclass(frozen=True)
class Turn:
    """One request: the whole history so far with the new question. think_seconds: pause before it is sent."""

    conversation: int
    number: int
    think_seconds: float
    prompt: Prompt


@dataclass(frozen=True)
class Conversation:
    """Starts ``start_seconds`` into the load; each turn is sent after the answer to the one before and a pause."""

    number: int
    start_seconds: float
    turns: tuple[Turn, ...]


def conversations(shape: Shape, seed: int = 7) -> list[Conversation]:
    """The same load for the same shape and seed, answers included (a simulated engine's answer is known beforehand)."""
    source = random.Random(seed)
    systems = [_tokens(source, shape.system_tokens) for _ in range(shape.system_prompts)]
    made = []
    for number in range(shape.conversations):
        history = list(systems[number % shape.system_prompts])
        turns = []
        for turn in range(source.randint(*shape.turns)):
            history = history + _tokens(source, source.randint(*shape.question_tokens))
            prompt = Prompt(history, shape.answer_tokens)
            turns.append(Turn(number, turn, source.uniform(*shape.think_seconds) if turn else 0.0, prompt))
            history = history + output_tokens(prompt)
        start = number * shape.start_window_seconds / shape.conversations
        made.append(Conversation(number, start, tuple(turns)))
    return made


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(VOCABULARY) for _ in range(count)]
