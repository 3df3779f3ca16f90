"""What wrote raoe_train's built-in corpus: English sentence pairs about small scenes, from a seeded generator.

    python -m tests.data.builtin_corpus      writes raoe_train/data/builtin.jsonl.gz and builtin-nli.jsonl.gz

A scene has an agent, an action and, where they apply, an object, a place and modifiers of agent and object. A
pair is a scene and an edited copy: other words for the same thing, a more general word, a modifier or place
added or left out, another agent, action, object or place, an opposite, a negation, or another scene
altogether. Both targets follow from comparing the two scenes slot by slot:

    similarity = c * sum_s w_s a_s / sum_s w_s      over the slots s that at least one of the two scenes fills

with WEIGHTS w_s, the AGREEMENT a_s of what fills slot s, and c = CONTRADICTED where one sentence negates the
other or a slot holds opposites, else 1. The NLI label takes both sentences to be about one event: entailment
if every slot of the second repeats the first or says less; contradiction if exactly one negation or opposite
is all that stands in the way of that; neutral otherwise.

Scenes are dealt to the splits by agent, action and object, the same way for every seed: no premise of one
split can be written in another.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from raoe_train.data.columns import NLI_LABELS
from raoe_train.data.files import write_rows

ENTAILMENT, NEUTRAL, CONTRADICTION = NLI_LABELS.values()
DATA = Path(__file__).parents[2] / "raoe_train" / "data"

WEIGHTS = {
    "action": 0.30,
    "agent": 0.25,
    "object": 0.20,
    "place": 0.13,
    "agent_modifier": 0.06,
    "object_modifier": 0.06,
}
AGREEMENT = {
    **{"same": 1.0, "synonym": 0.95, "general": 0.75, "specific": 0.75},
    **{"dropped": 0.4, "added": 0.4, "related": 0.3, "opposite": 0.3, "different": 0.0},
}
CONTRADICTED = 0.5
SAYS_NO_MORE = ("same", "synonym", "general", "dropped")
"""What a slot of an entailed sentence can be to the slot of the sentence that entails it."""

SPLITS = {"train": 6000, "dev": 1000, "test": 1000}
"""Pairs of the built-in splits."""


@dataclass(frozen=True)
class Filler:
    """The content of a slot: a concept ("word" or "word|synonym") and the word used for it, which may be its kind."""

    concept: str
    word: str


@dataclass(frozen=True)
class Scene:
    agent: Filler
    action: Filler
    object: Filler | None
    place: Filler | None
    agent_modifier: Filler | None
    object_modifier: Filler | None
    negated: bool = False


OMISSIBLE = ("place", "agent_modifier", "object_modifier")
"""Slots that a sentence can do without."""
Core = tuple[str, str, str]


class Words:
    """corpus_words.yaml, with the `kind` and the `opposite` of each concept that has one."""

    def __init__(self) -> None:
        read = yaml.safe_load(Path(__file__).with_name("corpus_words.yaml").read_text(encoding="utf-8"))
        self.agents: dict[str, list[str]] = read["agents"]
        self.objects: dict[str, list[str]] = read["objects"]
        self.actions: dict[str, list[str]] = read["actions"]
        self.places: list[str] = read["places"]
        self.modifiers: dict[str, list[str]] = read["modifiers"]
        of_kind = {**self.agents, **self.objects}
        self.kind = {concept: kind for kind, concepts in of_kind.items() for concept in concepts}
        self.opposite = {one: other for pair in read["opposites"] for one, other in (pair, reversed(pair))}


words = functools.cache(Words)


@functools.cache
def _cores() -> dict[str, list[Core]]:
    """The (agent, action, object) of each split's scenes: of 10, 8 train, 1 dev, 1 test."""
    every = [
        (agent, action, object_)
        for agent in itertools.chain(*words().agents.values())
        for action, kinds in words().actions.items()
        for object_ in ([name for kind in kinds for name in words().objects[kind]] or [""])
    ]
    random.Random("scenes").shuffle(every)
    tenth = len(every) // 10
    return {"dev": every[:tenth], "test": every[tenth : 2 * tenth], "train": every[2 * tenth :]}


def core_of(scene: Scene) -> Core:
    """The parts of a scene that determine its split."""
    return scene.agent.concept, scene.action.concept, scene.object.concept if scene.object else ""


def relation(first: Filler | None, second: Filler | None) -> str | None:
    """What the second filler of a slot is to the first, a key of AGREEMENT; None if neither scene fills the slot."""
    if first is None or second is None:
        return None if first is second else "added" if first is None else "dropped"
    if first.concept == second.concept:
        if first.word == second.word:
            return "same"
        kind = words().kind.get(first.concept)
        return "general" if second.word == kind else "specific" if first.word == kind else "synonym"
    if words().opposite.get(first.concept) == second.concept:
        return "opposite"
    kind = words().kind.get(first.concept)
    return "related" if kind is not None and kind == words().kind.get(second.concept) else "different"


def compare(first: Scene, second: Scene) -> tuple[float, int]:
    """(similarity in [0, 1], NLI label) of a pair of scenes, by the formula at the top."""
    relations = {slot: relation(getattr(first, slot), getattr(second, slot)) for slot in WEIGHTS}
    filled = {slot: name for slot, name in relations.items() if name is not None}
    agreed = sum(WEIGHTS[slot] * AGREEMENT[name] for slot, name in filled.items())
    overlap = agreed / sum(WEIGHTS[slot] for slot in filled)
    contradictions = list(filled.values()).count("opposite") + (first.negated != second.negated)
    rest_entailed = all(name in SAYS_NO_MORE for name in filled.values() if name != "opposite")
    if not rest_entailed or contradictions > 1:
        label = NEUTRAL
    else:
        label = CONTRADICTION if contradictions else ENTAILMENT
    return round(overlap * (CONTRADICTED if contradictions else 1.0), 4), label


def write(scene: Scene, order: str) -> str:
    """The scene as a sentence; order "plain", "place first" or "there is" (which say the same)."""
    agent = _noun_phrase(scene.agent_modifier, scene.agent)
    object_ = f" {_noun_phrase(scene.object_modifier, scene.object)}" if scene.object else ""
    place = f" {scene.place.word}" if scene.place else ""
    deed = ("not " if scene.negated else "") + scene.action.word + object_
    if order == "there is" and not scene.negated:
        text = f"there is {agent} {deed}{place}"
    elif order == "place first" and scene.place:
        text = f"{scene.place.word}, {agent} is {deed}"
    else:
        text = f"{agent} is {deed}{place}"
    return text[0].upper() + text[1:] + "."


def _with(scene: Scene, slot: str, filler: Filler | None) -> Scene:
    changes: dict[str, Any] = {slot: filler}
    return replace(scene, **changes)


def _noun_phrase(modifier: Filler | None, noun: Filler) -> str:
    words = f"{modifier.word} {noun.word}" if modifier else noun.word
    return ("an " if words[0] in "aeiou" and not words.startswith("used") else "a ") + words


class _Generator:
    """Draws scenes and edits of one split; every draw is choice, random or shuffle of one random.Random."""

    def __init__(self, split: str, rng: random.Random) -> None:
        self.cores, self.core_set, self.rng = _cores()[split], frozenset(_cores()[split]), rng

    def filler(self, concept: str) -> Filler:
        words = concept.split("|")
        return Filler(concept, words[-1] if self.rng.random() < 0.3 else words[0])

    def modifier(self, noun: str) -> Filler:
        return self.filler(self.rng.choice(words().modifiers[noun]))

    def scene(self) -> Scene:
        agent, action, object_ = self.rng.choice(self.cores)
        chance = self.rng.random
        return Scene(
            agent=self.filler(agent),
            action=self.filler(action),
            object=self.filler(object_) if object_ else None,
            place=self.filler(self.rng.choice(words().places)) if chance() < 0.6 else None,
            agent_modifier=self.modifier("agent") if chance() < 0.5 else None,
            object_modifier=self.modifier("object") if object_ and chance() < 0.4 else None,
        )

    def reword(self, scene: Scene) -> Scene:
        """An edit after which the scene means the same or less."""
        slot = self.rng.choice([slot for slot in WEIGHTS if getattr(scene, slot) is not None])
        filler = getattr(scene, slot)
        kind = words().kind.get(filler.concept)
        edits: list[Filler | None] = [
            Filler(filler.concept, word) for word in filler.concept.split("|") if word != filler.word
        ]
        if kind:
            edits.append(Filler(filler.concept, kind))
        if slot in OMISSIBLE:
            edits.append(None)
        return _with(scene, slot, self.rng.choice(edits)) if edits else scene

    def contradict(self, scene: Scene) -> Scene:
        """A negation, or an opposite where a slot has one."""
        slots = [slot for slot in WEIGHTS if (filler := getattr(scene, slot)) and filler.concept in words().opposite]
        slot = self.rng.choice(["negated", *slots])
        if slot == "negated":
            return replace(scene, negated=True)
        return _with(scene, slot, self.filler(words().opposite[getattr(scene, slot).concept]))

    def change(self, scene: Scene) -> Scene:
        """An edit that adds or changes information."""
        slot = self.rng.choice(list(WEIGHTS))
        filler = getattr(scene, slot)
        if slot.endswith("_modifier"):
            noun = slot.removesuffix("_modifier")
            return scene if getattr(scene, noun) is None else _with(scene, slot, self.modifier(noun))
        if slot == "place":
            return replace(scene, place=self.filler(self.rng.choice(words().places)))
        if filler is None:
            return scene
        if slot == "action":
            kind = words().kind[scene.object.concept] if scene.object else ""
            choices = [name for name, kinds in words().actions.items() if (kind in kinds if kind else not kinds)]
        else:
            of_kind = words().agents if slot == "agent" else words().objects
            kinds = list(of_kind) if slot == "agent" else words().actions[scene.action.concept]
            if self.rng.random() < 0.5:
                kinds = [kind for kind in kinds if kind == words().kind[filler.concept]]
            choices = [name for kind in kinds for name in of_kind[kind]]
        return _with(scene, slot, self.filler(self.rng.choice(choices)))

    def pair(self, target: int, premise_scene: Scene | None = None) -> tuple[str, str, float, int]:
        """(premise, hypothesis, similarity, label) with the label `target`, of a new scene or of the one given."""
        while True:
            first = second = premise_scene or self.scene()
            for _ in range(self.rng.choice((0, 1, 1, 2, 3))):
                second = self.reword(second)
            if target == CONTRADICTION:
                second = self.contradict(second)
            if target == NEUTRAL:
                if self.rng.random() < 0.25:
                    second = self.scene()
                for _ in range(self.rng.choice((1, 1, 2, 3))):
                    second = self.change(second)
                if self.rng.random() < 0.1:
                    second = replace(second, negated=True)
            similarity, label = compare(first, second)
            orders = ("plain", "plain", "place first", "there is")
            premise, hypothesis = (write(scene, self.rng.choice(orders)) for scene in (first, second))
            if label == target and premise != hypothesis and core_of(second) in self.core_set:
                return premise, hypothesis, similarity, label


def pair_rows(n_pairs: int, seed: int, split: str) -> list[dict[str, Any]]:
    """`n_pairs` different pairs of one split, a third of each NLI label, in random order."""
    rng = random.Random(f"{seed} {split}")
    generator = _Generator(split, rng)
    written: dict[tuple[str, str], tuple[float, int]] = {}
    while len(written) < n_pairs:
        first, second, similarity, label = generator.pair(len(written) % 3)
        written.setdefault((first, second), (similarity, label))
    pairs = list(written.items())
    rng.shuffle(pairs)
    return [
        {"sentence1": first, "sentence2": second, "score": similarity, "label": label, "split": split}
        for (first, second), (similarity, label) in pairs
    ]


def nli_rows(split: str) -> Iterator[dict[str, Any]]:
    """As SNLI has them: each premise with an entailed, a neutral and a contradicting hypothesis. A third as many
    premises as there are pairs."""
    generator = _Generator(split, random.Random(f"nli {split}"))
    seen: set[str] = set()
    while len(seen) < SPLITS[split] // 3:
        scene = generator.scene()
        premise = write(scene, "plain")
        if premise in seen:
            continue
        seen.add(premise)
        for label in (ENTAILMENT, NEUTRAL, CONTRADICTION):
            hypothesis = premise
            while hypothesis == premise:
                _, hypothesis, _, _ = generator.pair(label, scene)
            yield {"premise": premise, "hypothesis": hypothesis, "label": label, "split": split}


def main(folder: Path = DATA) -> None:
    """Write both corpus files."""
    pairs = [row for split, count in SPLITS.items() for row in pair_rows(count, 0, split)]
    nli = [row for split in SPLITS for row in nli_rows(split)]
    for name, rows in (("builtin", pairs), ("builtin-nli", nli)):
        write_rows(folder / f"{name}.jsonl.gz", list(rows[0]), rows)


if __name__ == "__main__":
    main()
