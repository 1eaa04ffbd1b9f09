"""The demo's tasks, made by mutation: a module of one function whose operator was replaced by a wrong one.

The verb in the function's name says what it should do (`above_cup` compares with `>`), so the fix can be
learnt: copy the line number and the wrong operator out of the listing, and choose the operator that the verb
stands for. Function names (by their nouns) and constants of the three splits are disjoint, and so are the
mutations (verb, wrong operator) of the held-out split and of the other two.

Pure: everything follows from the random generator that is passed in.
"""

from __future__ import annotations

import difflib
import random
from dataclasses import dataclass
from typing import Final

#: Correct operator -> verbs. The demonstrations' teacher knows the first of each and guesses the others.
VERBS: Final = {
    "+": ("add", "plus", "raise"),
    "-": ("sub", "minus", "drop"),
    "*": ("mul", "times", "scale"),
    "%": ("mod", "rem", "wrap"),
    "<": ("below", "under", "less"),
    ">": ("above", "over", "more"),
}
OPERATORS: Final = tuple(VERBS)
OPERATOR_OF: Final = {verb: op for op, verbs in VERBS.items() for verb in verbs}
KNOWN_VERBS: Final = frozenset(verb for verbs in VERBS.values() for verb in verbs[:1])
_ALL_VERBS: Final = tuple(OPERATOR_OF)
_VERB_RANK: Final = {verb: i for i, verb in enumerate(sorted(_ALL_VERBS))}
#: Of equal length, so that listings of the splits differ in words and not in shape.
_NOUN_TEXT: Final = (
    "age ant arm ash axe bag bar bay bed bee box bug bus cab cap car cat cow cup dam day den dog ear "
    "egg eye fan fee fig fog fox gas gem gum ham hat hen ice ink ivy jam jar jet job key kit lab leg "
    "lid lip log map mud net nut oak oil ore owl pan pea pie pin pot rat rib rod row rug sea sky sun "
    "tag tax tea tip toy tub van wax web zip "
)
_NOUNS: Final = tuple(sorted(_NOUN_TEXT.split()))
_VARIABLES: Final = ("x", "n", "v", "a")
MODULES: Final = ("ops", "core", "util", "calc")
_HEADER_LINES: Final = (
    "import math",
    "import os",
    "# helpers",
    "# see docs",
    "DEBUG = 0",
    "LIMIT = 9",
    "import sys",
)
#: Splits; the position decides which nouns and constants belong to it.
SPLITS: Final = ("sft", "train", "held_out")
_PAIRS: Final = ((5, 3), (3, 5), (4, 4), (7, 2), (1, 9), (12, 5))
#: A split has several times as many different tasks.
MAX_TASKS: Final = 20_000
#: Share of right fixes among the demonstrations on verbs that the teacher does not know.
TEACHER_SKILL: Final = 0.35
#: What mini-swe-agent takes as the end of the task when it is a command's first line of output.
SUBMIT: Final = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
README: Final = "# Helpers\n\nSmall functions. Their names say what they do.\n"


@dataclass(frozen=True)
class DemoTask:
    """A mutated module, its tests and its fix."""

    split: str
    module: str
    function: str
    verb: str
    noun: str
    parameters: tuple[str, ...]
    constant: int | None
    wrong: str
    right: str
    header: tuple[str, ...]

    @property
    def line(self) -> int:
        """Number of the mutated line, from 1."""
        return len(self.header) + 2

    def source(self, operator: str) -> str:
        """The module with `operator` in its one expression."""
        operand = self.parameters[1] if self.constant is None else str(self.constant)
        body = f"    return {self.parameters[0]} {operator} {operand}"
        return "\n".join((*self.header, f"def {self.function}({', '.join(self.parameters)}):", body)) + "\n"

    @property
    def file(self) -> str:
        """The module's file."""
        return f"{self.module}.py"

    @property
    def instruction(self) -> str:
        """What the agent is told: the failing test and what `cat -n` prints. No newline at its end."""
        lines = self.source(self.wrong).splitlines()
        listing = "\n".join(f"{i:6d}\t{text}" for i, text in enumerate(lines, 1))
        return f"FAILED test_{self.file}::test_{self.function}\n$ cat -n {self.file}\n{listing}"

    def command(self, operator: str) -> str:
        """The shell command that puts `operator` in place of the wrong one and submits."""
        return f"sed -i '{self.line}s/{self.wrong}/{operator}/' {self.file} && {SUBMIT}"

    @property
    def cases(self) -> tuple[tuple[int, ...], ...]:
        """Arguments the failing test calls the function with."""
        if self.constant is None:
            return _PAIRS
        k = self.constant
        return tuple((z,) for z in (0, 1, 2, k - 1, k, k + 1, 50, 173))

    def evaluate(self, operator: str) -> list[int | bool]:
        """What the function returns for `cases` with `operator`."""
        return [_apply(operator, c[0], c[1] if self.constant is None else self.constant) for c in self.cases]

    @property
    def test_source(self) -> str:
        """tests/test_<module>.py: one test of what the function computes, two of what the mutation leaves alone."""
        name, call = self.function, f"{self.module}.{self.function}"
        first = ", ".join(map(str, self.cases[0]))
        expected = zip(self.cases, self.evaluate(self.right), strict=True)
        checks = "".join(f"    assert {call}({', '.join(map(str, c))}) == {value!r}\n" for c, value in expected)
        return (
            f"import inspect\n\nimport {self.module}\n\n\n"
            f"def test_{name}():\n{checks}\n\n"
            f"def test_{name}_parameters():\n"
            f"    assert list(inspect.signature({call}).parameters) == {list(self.parameters)!r}\n\n\n"
            f"def test_{name}_repeats():\n    assert {call}({first}) == {call}({first})\n"
        )

    @property
    def gold_patch(self) -> str:
        """The fix as a unified diff against the repository root."""
        before, after = (self.source(op).splitlines(keepends=True) for op in (self.wrong, self.right))
        hunks = "".join(difflib.unified_diff(before, after, f"a/{self.file}", f"b/{self.file}"))
        return f"diff --git a/{self.file} b/{self.file}\n{hunks}"


def _apply(operator: str, x: int, y: int) -> int | bool:
    match operator:
        case "+":
            return x + y
        case "-":
            return x - y
        case "*":
            return x * y
        case "%":
            return x % y
        case "<":
            return x < y
        case ">":
            return x > y
    raise ValueError(f"unknown operator {operator!r}; known: {' '.join(OPERATORS)}")


def is_held_out_mutation(verb: str, wrong: str) -> bool:
    """Whether (verb, wrong operator) is reserved for the held-out split: one pair in three."""
    return (_VERB_RANK[verb] + OPERATORS.index(wrong)) % 3 == 0


def make_demo_task(rng: random.Random, split: str) -> DemoTask:
    """Draw a task of `split`. Its test fails with every operator but the right one."""
    part = SPLITS.index(split)
    while True:
        verb, noun = rng.choice(_ALL_VERBS), rng.choice(_NOUNS[part::3])
        variable, two = rng.choice(_VARIABLES), rng.random() < 0.5
        constant = None if two else rng.choice(range(2, 100)[(part - 2) % 3 :: 3])
        right = OPERATOR_OF[verb]
        held_out = split == "held_out"
        wrong = rng.choice([o for o in OPERATORS if o != right and is_held_out_mutation(verb, o) == held_out])
        task = DemoTask(
            split=split,
            module=rng.choice(MODULES),
            function=f"{verb}_{noun}",
            verb=verb,
            noun=noun,
            parameters=(variable, "y") if two else (variable,),
            constant=constant,
            wrong=wrong,
            right=right,
            header=tuple(rng.sample(_HEADER_LINES, rng.randint(0, 3))),
        )
        expected = task.evaluate(right)
        if all(task.evaluate(other) != expected for other in OPERATORS if other != right):
            return task


def make_demo_tasks(seed: int, split: str, count: int) -> list[DemoTask]:
    """`count` different tasks of a split, the same ones for the same seed."""
    if count > MAX_TASKS:
        raise ValueError(f"{count} tasks of split {split!r} were asked for; at most {MAX_TASKS} are different enough")
    rng = random.Random(f"demo:{seed}:{split}")
    tasks: dict[tuple[str, str], DemoTask] = {}
    while len(tasks) < count:
        task = make_demo_task(rng, split)
        tasks.setdefault((task.module, task.source(task.wrong)), task)
    return list(tasks.values())


def make_demonstration(rng: random.Random, task: DemoTask, skill: float = TEACHER_SKILL) -> str:
    """What the weak teacher does: the right fix with probability `skill`, else another operator at random.

    A policy that imitates it knows what the verbs tend to mean and is no better than the teacher however long it
    imitates; the tests' verdicts are what makes it better.
    """
    others = [o for o in OPERATORS if o not in (task.wrong, task.right)]
    known = task.verb in KNOWN_VERBS or rng.random() < skill
    return task.command(task.right if known else rng.choice(others))
