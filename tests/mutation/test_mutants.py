"""The list of mutants is of the code as it is. (What they show takes ``python -m tests.mutation``.)"""

from __future__ import annotations

import ast
from collections import Counter

from tests.mutation.__main__ import MUTANTS, ROOT
from tests.mutation.of_training import TRAINING


def test_every_mutant_is_one_change():
    assert 50 <= len(TRAINING) <= 60
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, mutant
        changed = text.replace(mutant.old, mutant.new)
        assert changed != text, mutant
        if mutant.file.endswith(".py"):
            ast.parse(changed)
        files = [word.partition("::")[0] for word in mutant.tests.split() if word.startswith("tests/")]
        assert files and all((ROOT / file).is_file() for file in files), mutant
    assert not [mutant for mutant, count in Counter(mutant[:3] for mutant in MUTANTS).items() if count > 1]
