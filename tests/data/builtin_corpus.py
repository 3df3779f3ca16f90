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

Scenes are dealt to the splits by agent, action and object: no premise of one split can be written in another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import yaml

from raoe_train.data.columns import NLI_LABELS
from raoe_train.data.files import write_rows

ENTAILMENT, NEUTRAL, CONTRADICTION = NLI_LABELS.values()
DATA = Path(__file__).parents[2] / "raoe_train" / "data"
WORDS = yaml.safe_load(Path(__file__).with_name("corpus_words.yaml").read_text(encoding="utf-8"))
OF_KIND = {**WORDS["agents"], **WORDS["objects"]}
KIND = {concept: kind for kind, concepts in OF_KIND.items() for concept in concepts}
OPPOSITE = {one: other for pair in WORDS["opposites"] for one, other in (pair, reversed(pair))}

WEIGHTS = {
    **{"action": 0.30, "agent": 0.25, "object": 0.20, "place": 0.13},
    **{"agent_modifier": 0.06, "object_modifier": 0.06},
}
AGREEMENT = {
    **{"same": 1.0, "synonym": 0.95, "general": 0.75, "specific": 0.75},
    **{"dropped": 0.4, "added": 0.4, "related": 0.3, "opposite": 0.3, "different": 0.0},
}
CONTRADICTED = 0.5
# What a slot of an entailed sentence can be to the slot of the sentence that entails it.
SAYS_NO_MORE = ("same", "synonym", "general", "dropped")
SPLITS = {"train": 6000, "dev": 1000, "test": 1000}  # pairs

# A concept ("word" or "word|synonym") and the word used for it, which may be its kind.
Filler = tuple[str, str]
# What fills each slot of WEIGHTS, or None; and "negated".
Scene = dict[str, Any]


def cores() -> dict[str, list[tuple[str, str, str]]]:
    """The (agent, action, object) of each split's scenes: of 10, 8 train, 1 dev, 1 test."""
    every = [
        (agent, action, noun)
        for agent in itertools.chain(*WORDS["agents"].values())
        for action, kinds in WORDS["actions"].items()
        for noun in ([name for kind in kinds for name in OF_KIND[kind]] or [""])
    ]
    Random("scenes").shuffle(every)
    tenth = len(every) // 10
    return {"dev": every[:tenth], "test": every[tenth : 2 * tenth], "train": every[2 * tenth :]}


CORES = cores()


def relation(first: Filler | None, second: Filler | None) -> str | None:
    """What the second filler of a slot is to the first, a key of AGREEMENT; None if neither scene fills the slot."""
    if first is None or second is None:
        return None if first is second else "added" if first is None else "dropped"
    (concept, word), (other, chosen) = first, second
    kind = KIND.get(concept)
    if concept == other:
        if word == chosen:
            return "same"
        return "general" if chosen == kind else "specific" if word == kind else "synonym"
    if OPPOSITE.get(concept) == other:
        return "opposite"
    return "related" if kind is not None and kind == KIND.get(other) else "different"


def compare(first: Scene, second: Scene) -> tuple[float, int]:
    """(similarity in [0, 1], NLI label) of a pair of scenes, by the formula at the top."""
    relations = {slot: relation(first[slot], second[slot]) for slot in WEIGHTS}
    filled = {slot: name for slot, name in relations.items() if name is not None}
    agreed = sum(WEIGHTS[slot] * AGREEMENT[name] for slot, name in filled.items())
    overlap = agreed / sum(WEIGHTS[slot] for slot in filled)
    contradictions = [*filled.values()].count("opposite") + (first["negated"] != second["negated"])
    label = CONTRADICTION if contradictions else ENTAILMENT
    if contradictions > 1 or not {*filled.values()} <= {*SAYS_NO_MORE, "opposite"}:
        label = NEUTRAL
    return round(overlap * (CONTRADICTED if contradictions else 1.0), 4), label


def noun_phrase(scene: Scene, noun: str) -> str:
    modifier = scene[f"{noun}_modifier"]
    words = f"{modifier[1]} {scene[noun][1]}" if modifier else scene[noun][1]
    return ("an " if words[0] in "aeiou" and not words.startswith("used") else "a ") + words


def write(scene: Scene, order: str) -> str:
    """The scene as a sentence; order "plain", "place first" or "there is" (which say the same)."""
    agent, place = noun_phrase(scene, "agent"), f" {scene['place'][1]}" if scene["place"] else ""
    deed = ("not " if scene["negated"] else "") + scene["action"][1]
    deed += f" {noun_phrase(scene, 'object')}" if scene["object"] else ""
    if order == "there is" and not scene["negated"]:
        text = f"there is {agent} {deed}{place}"
    elif order == "place first" and place:
        text = f"{place[1:]}, {agent} is {deed}"
    else:
        text = f"{agent} is {deed}{place}"
    return text[0].upper() + text[1:] + "."


class Generator(Random):
    """Draws scenes of one split, and edits of scenes."""

    def filler(self, concept: str) -> Filler:
        words = concept.split("|")
        return concept, words[-1] if self.random() < 0.3 else words[0]

    def modifier(self, noun: str) -> Filler:
        return self.filler(self.choice(WORDS["modifiers"][noun]))

    def place(self) -> Filler:
        return self.filler(self.choice(WORDS["places"]))

    def scene(self, split: str) -> Scene:
        agent, action, noun = self.choice(CORES[split])
        return {
            "agent": self.filler(agent),
            "action": self.filler(action),
            "object": self.filler(noun) if noun else None,
            "place": self.place() if self.random() < 0.6 else None,
            "agent_modifier": self.modifier("agent") if self.random() < 0.5 else None,
            "object_modifier": self.modifier("object") if noun and self.random() < 0.4 else None,
            "negated": False,
        }

    def reword(self, scene: Scene) -> Scene:
        """An edit after which the scene means the same or less."""
        slot = self.choice([slot for slot in WEIGHTS if scene[slot]])
        concept, word = scene[slot]
        words = [each for each in (*concept.split("|"), KIND.get(concept)) if each]
        edits: list[Filler | None] = [(concept, each) for each in words if each != word or each == KIND.get(concept)]
        if slot == "place" or slot.endswith("_modifier"):  # a sentence can do without
            edits.append(None)
        return scene | {slot: self.choice(edits)} if edits else scene

    def contradict(self, scene: Scene) -> Scene:
        """A negation, or an opposite where a slot has one."""
        slot = self.choice(["negated", *(slot for slot in WEIGHTS if scene[slot] and scene[slot][0] in OPPOSITE)])
        return scene | {slot: True if slot == "negated" else self.filler(OPPOSITE[scene[slot][0]])}

    def change(self, scene: Scene) -> Scene:
        """An edit that adds or changes information."""
        slot = self.choice([*WEIGHTS])
        if slot == "place":
            return scene | {"place": self.place()}
        noun = slot.removesuffix("_modifier")
        if scene[noun] is None:
            return scene
        if noun != slot:
            return scene | {slot: self.modifier(noun)}
        if slot == "action":
            kind = KIND[scene["object"][0]] if scene["object"] else ""
            choices = [name for name, kinds in WORDS["actions"].items() if (kind in kinds if kind else not kinds)]
        else:
            kinds = [*WORDS["agents"]] if slot == "agent" else WORDS["actions"][scene["action"][0]]
            if self.random() < 0.5:
                kinds = [kind for kind in kinds if kind == KIND[scene[slot][0]]]
            choices = [name for kind in kinds for name in OF_KIND[kind]]
        return scene | {slot: self.filler(self.choice(choices))}

    def pair(self, split: str, target: int, premise: Scene | None = None) -> tuple[str, str, float]:
        """(premise, hypothesis, similarity) with the label `target`, of a new scene or of the one given."""
        while True:
            first = second = premise or self.scene(split)
            for _ in range(self.choice((0, 1, 1, 2, 3))):
                second = self.reword(second)
            if target == CONTRADICTION:
                second = self.contradict(second)
            if target == NEUTRAL:
                if self.random() < 0.25:
                    second = self.scene(split)
                for _ in range(self.choice((1, 1, 2, 3))):
                    second = self.change(second)
                if self.random() < 0.1:
                    second = second | {"negated": True}
            similarity, label = compare(first, second)
            orders = ("plain", "plain", "place first", "there is")
            texts = [write(scene, self.choice(orders)) for scene in (first, second)]
            core = second["agent"][0], second["action"][0], (second["object"] or [""])[0]
            if label == target and texts[0] != texts[1] and core in CORES[split]:
                return texts[0], texts[1], similarity


def pair_rows(split: str) -> list[dict[str, Any]]:
    """Distinct pairs of one split, a third of each NLI label, in random order."""
    rng = Generator(f"0 {split}")
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    while len(rows) < SPLITS[split]:
        label = len(rows) % 3
        *pair, score = rng.pair(split, label)
        row = {"sentence1": pair[0], "sentence2": pair[1], "score": score, "label": label, "split": split}
        rows.setdefault((pair[0], pair[1]), row)
    result = [*rows.values()]
    rng.shuffle(result)
    return result


def nli_rows(split: str) -> Iterator[dict[str, Any]]:
    """As SNLI has them: each premise with an entailed, a neutral and a contradicting hypothesis. A third as many
    premises as there are pairs."""
    rng = Generator(f"nli {split}")
    seen: set[str] = set()
    while len(seen) < SPLITS[split] // 3:
        scene = rng.scene(split)
        premise = write(scene, "plain")
        if premise not in seen:
            seen.add(premise)
            for label in (ENTAILMENT, NEUTRAL, CONTRADICTION):
                hypothesis = premise
                while hypothesis == premise:
                    _, hypothesis, _ = rng.pair(split, label, scene)
                yield {"premise": premise, "hypothesis": hypothesis, "label": label, "split": split}


def main(folder: Path = DATA) -> None:
    """Write both corpus files."""
    for name, rows in (("builtin", pair_rows), ("builtin-nli", nli_rows)):
        made = [row for split in SPLITS for row in rows(split)]
        write_rows(folder / f"{name}.jsonl.gz", [*made[0]], made)


if __name__ == "__main__":
    main()
