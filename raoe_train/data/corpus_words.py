"""Words of the built-in corpus: every entry is a concept, written as "word", or "word|synonym", with what it
is a kind of and what its opposite is where the corpus needs that."""

from __future__ import annotations

AGENTS: dict[str, tuple[str, ...]] = {
    # kind of -> concepts; the kind is a word for any of them
    "person": ("man|gentleman", "woman|lady", "boy|lad", "girl|lass"),
    "worker": (
        "farmer|grower",
        "teacher|instructor",
        "doctor|physician",
        "cook|chef",
        "driver|chauffeur",
        "clerk|cashier",
    ),
    "artist": ("painter", "singer|vocalist", "dancer", "actor|performer"),
    "athlete": ("runner|jogger", "swimmer", "cyclist|biker", "climber"),
}

OBJECTS: dict[str, tuple[str, ...]] = {
    "instrument": ("guitar", "piano", "violin|fiddle", "drum", "flute", "trumpet"),
    "fruit": ("apple", "banana", "pear", "peach", "melon"),
    "vegetable": ("carrot", "onion", "potato", "tomato", "pepper"),
    "meal": ("sandwich", "soup|broth", "salad", "pizza"),
    "container": ("box|carton", "bag|sack", "basket", "suitcase", "bucket|pail"),
    "vehicle": ("car|automobile", "truck|lorry", "bicycle|bike", "boat", "wagon|cart"),
    "animal": ("dog|hound", "cat", "horse", "cow", "goat", "sheep", "rabbit|bunny"),
    "text": ("book", "letter", "newspaper|paper", "magazine", "poem"),
    "toy": ("ball", "kite", "doll", "puzzle"),
    "furniture": ("chair", "table", "bench", "shelf"),
    "barrier": ("door", "gate", "window", "fence"),
}

ACTIONS: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
    # action (-ing form, with synonym), its opposite, and the kinds of objects it goes with; no kinds: takes
    # no object
    ("playing", None, ("instrument",)),
    ("eating|devouring", None, ("fruit", "meal")),
    ("slicing|cutting", None, ("fruit", "vegetable")),
    ("cooking|preparing", None, ("vegetable", "meal")),
    ("filling", "emptying", ("container",)),
    ("emptying", "filling", ("container",)),
    ("lifting|raising", "lowering", ("container", "toy", "furniture")),
    ("lowering", "lifting|raising", ("container", "toy", "furniture")),
    ("carrying|hauling", None, ("container", "toy", "instrument")),
    ("buying|purchasing", "selling", ("vehicle", "fruit", "furniture", "instrument")),
    ("selling", "buying|purchasing", ("vehicle", "fruit", "furniture", "instrument")),
    ("pushing|shoving", "pulling|dragging", ("vehicle", "furniture")),
    ("pulling|dragging", "pushing|shoving", ("vehicle", "furniture")),
    ("washing|cleaning", None, ("vehicle", "animal", "vegetable")),
    ("feeding", None, ("animal",)),
    ("chasing|pursuing", None, ("animal",)),
    ("reading|studying", None, ("text",)),
    ("writing|composing", None, ("text",)),
    ("throwing|tossing", "catching", ("toy",)),
    ("catching", "throwing|tossing", ("toy",)),
    ("building|constructing", "breaking|smashing", ("furniture", "barrier", "toy")),
    ("breaking|smashing", "building|constructing", ("furniture", "barrier", "toy")),
    ("opening", "closing|shutting", ("barrier", "container")),
    ("closing|shutting", "opening", ("barrier", "container")),
    ("painting|coloring", None, ("barrier", "furniture")),
    ("sleeping|napping", None, ()),
    ("dancing", None, ()),
    ("laughing", "crying|weeping", ()),
    ("crying|weeping", "laughing", ()),
    ("swimming", None, ()),
    ("shouting|yelling", "whispering", ()),
    ("whispering", "shouting|yelling", ()),
)

PLACES: tuple[str, ...] = (
    "in the garden|in the yard",
    "in the kitchen",
    "in the park",
    "at the beach|at the shore",
    "in the street|in the road",
    "at the market|at the bazaar",
    "in the forest|in the woods",
    "near the river|near the stream",
    "on the stage",
    "in the library",
    "on the hill",
    "at the station",
    "in the barn|in the shed",
    "on the roof",
)

AGENT_MODIFIERS: tuple[tuple[str, str | None], ...] = (
    ("young|youthful", "old|elderly"),
    ("old|elderly", "young|youthful"),
    ("tall", "short"),
    ("short", "tall"),
    ("happy|cheerful", "sad|unhappy"),
    ("sad|unhappy", "happy|cheerful"),
    ("strong", "weak|frail"),
    ("weak|frail", "strong"),
    ("rich|wealthy", "poor"),
    ("poor", "rich|wealthy"),
    ("tired|weary", None),
    ("famous|renowned", None),
    ("clever|smart", None),
)

OBJECT_MODIFIERS: tuple[tuple[str, str | None], ...] = (
    ("big|large", "small|little"),
    ("small|little", "big|large"),
    ("new", "used"),
    ("used", "new"),
    ("heavy", "light"),
    ("light", "heavy"),
    ("cheap|inexpensive", "expensive|costly"),
    ("expensive|costly", "cheap|inexpensive"),
    ("clean", "dirty|filthy"),
    ("dirty|filthy", "clean"),
    ("red", None),
    ("green", None),
    ("blue", None),
    ("white", None),
)
