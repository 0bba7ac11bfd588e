"""User turns of many kinds, for the target to answer: code, questions, chat, and passages with a task.

Nothing is downloaded. Functions and descriptions come from Python's own library; other passages are answers that the
target has given before; most questions are begun here, often with a word of the vocabulary for a subject, and ended by
the target itself.
"""

from __future__ import annotations

import ast
import functools
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

QUESTIONS = (
    # writing and roleplay
    "Write an email to",
    "Write a short story about",
    "Write a poem about",
    "Write a blog post about",
    "Write a persuasive paragraph about",
    "Describe a scene in which",
    "Draft a letter to",
    "Pretend you are",
    "You are a",
    "Imagine that you are",
    "Act as a",
    "Give me advice on",
    "Suggest",
    # knowledge
    "Explain",
    "Explain in simple words",
    "What is the difference between",
    "What are the main causes of",
    "How does",
    "Why do",
    "Describe the role of",
    "Discuss the impact of",
    "Compare",
    "Give an overview of",
    "What are the advantages and disadvantages of",
    "Who was",
    "Provide examples of",
    "List five",
    "What steps",
    # mathematics and reasoning
    "Solve step by step:",
    "How many",
    "If a train",
    "If x",
    "Find the value of",
    "Prove that",
    "A store sells",
    "A man has",
    "Calculate",
    "Which of these does not belong:",
    "Think step by step.",
    "There are three",
    "What comes next in the sequence",
    # code
    "Write a Python function that",
    "Write a program in C++ that",
    "Write an HTML page",
    "Implement an algorithm",
    "Write a SQL query that",
    "Fix the bug in this function:\n",
    "How can I",
    # language
    "Translate to French:",
    "Translate into English:",
    "Rewrite this paragraph:",
    "Correct the grammar:",
    "Classify the sentiment of",
    "",
    "",
    "",
    "",
)
"""Beginnings that the target ends in its own way."""
PASSAGE_TASKS = (
    "Summarize the following text in two sentences.\n\n{}",
    "Summarise the main points of this text as a list:\n{}",
    "{}\n\nSummarize this in one paragraph.",
    "Rewrite the following text so that a child understands it:\n\n{}",
    "Rewrite this text in a formal tone:\n\n{}",
    "Make this text shorter:\n\n{}",
    "Extract the most important terms from the text below and explain each one.\n\n{}",
    "Extract all names, places and numbers from this text. Answer in JSON.\n\n{}",
    "Read the text and list the facts that it states, one per line.\n\n{}",
    "What is the tone of the following text? Explain why.\n\n{}",
    "Give the text below a title, and say in one sentence what it is about.\n\n{}",
    "Translate the following text to French:\n{}",
    "Translate the following text to Spanish:\n{}",
    "Correct the mistakes in this text, if there are any:\n\n{}",
    "Evaluate the following text on a scale from 1 to 5 and give reasons:\n\n{}",
    "Continue this text:\n\n{}",
)
PASSAGE_QUESTIONS = (
    "Answer the question with the help of the text.\n\n{}\n\nQuestion:",
    "Context: {}\n\nQuestion:",
    "{}\n\nBased on this text,",
    'Given the text "{}", what',
)
"""Tasks whose end the target writes."""
CODE_TASKS = (
    "{stub}",
    "{stub}",
    "{stub}",
    "Complete the following function.\n\n{stub}",
    "Write a Python function `{name}`. {summary}",
    "Explain what this code does:\n\n{source}",
    "Write tests for this function:\n\n{source}",
    "Translate this function to JavaScript:\n\n{source}",
    "Is there a bug in this code? How could it be better?\n\n{source}",
    "Add comments to this code:\n```python\n{source}\n```",
)
FOLLOW_UPS = (
    "Can you give an example?",
    "Please make it shorter.",
    "Now explain it to a five-year-old.",
    "Why is that?",
    "Rewrite your answer as a list.",
    "What are the limits of this?",
    "Can you say more about the first point?",
    "Now write it in the style of a news report.",
    "Translate your answer to French.",
    "Are you sure? Check your answer.",
    "Add one more paragraph.",
    "Give me three alternatives.",
    "How would you do it without that?",
    "Put it into a table.",
    "Now do the same for another example of your choice.",
    "Start every sentence with the same letter.",
    "What would happen otherwise?",
    "Thank you. What should I do next?",
)
END_SHARE, OPEN_SHARE = 0.4, 0.2
"""Share of the answers that end a row, and of those behind which the target writes the next turn itself."""
SHARES = {"question": 0.7, "passage": 0.15, "code": 0.15}
"""Of the rows, by kind."""
WORD_SHARE = 0.5
"""Of the questions whose beginning ends in a letter: those that go on with a word of the tokenizer's vocabulary."""
LIBRARY_SHARE = 0.2
"""Of the passages: descriptions from Python's library; the others are the target's own answers."""
MOST_CHARACTERS = 900
"""In a passage or a function."""
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}


@dataclass(frozen=True, slots=True)
class Opening:
    """A user turn."""

    text: str
    complete: bool
    """Whether it ends there; else the target writes on."""


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    stub: str
    """Its head and its docstring."""
    summary: str
    source: str


class Openings:
    """A source of user turns."""

    def __init__(self, choices: random.Random, words: Sequence[str]) -> None:
        self._choices, self._words = choices, words
        self._functions, self._passages = _from_library()
        self._answers: list[str] = []

    def first(self) -> Opening:
        """The first turn of a row."""
        (kind,) = self._choices.choices(list(SHARES), list(SHARES.values()))
        if kind == "question":
            text = self._choices.choice(QUESTIONS)
            if text[-1:].isalpha() and self._choices.random() < WORD_SHARE:
                text += f" {self._choices.choice(self._words)}"
            return Opening(text, complete=False)
        if kind == "code":
            function = self._choices.choice(self._functions)
            task = self._choices.choice(CODE_TASKS)
            return Opening(
                task.format(name=function.name, stub=function.stub, summary=function.summary, source=function.source),
                complete=True,
            )
        passages = self._passages if self._choices.random() < LIBRARY_SHARE else self._answers
        if not passages:
            return self.first()
        task = self._choices.choice(PASSAGE_TASKS + PASSAGE_QUESTIONS)
        return Opening(task.format(self._choices.choice(passages)), complete=task in PASSAGE_TASKS)

    def further(self) -> Opening | None:
        """A later turn; None: the row ends."""
        number = self._choices.random()
        if number < END_SHARE:
            return None
        if number < END_SHARE + OPEN_SHARE:
            return Opening("", complete=False)
        return Opening(self._choices.choice(FOLLOW_UPS), complete=True)

    def take(self, answer: str) -> None:
        """Keep a good answer as a passage for rows to come."""
        if 200 <= len(answer) <= MOST_CHARACTERS:
            self._answers.append(answer)


@functools.cache
def _from_library() -> tuple[list[_Function], list[str]]:
    """Functions with docstrings and longer descriptions, in the order of the library's files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    functions, passages = [], []
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT & set(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, UnicodeDecodeError, SyntaxError):
            continue
        functions += _functions(tree, source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef):
                passages += _paragraphs(ast.get_docstring(node) or "")
    return functions, passages


def _functions(tree: ast.Module, source: str) -> Iterator[_Function]:
    lines = source.splitlines()
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        documentation = ast.get_docstring(node) or ""
        text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if len(documentation) >= 40 and len(text) <= MOST_CHARACTERS:
            end = node.body[0].end_lineno
            stub = "\n".join(lines[node.lineno - 1 : end]) + "\n"
            yield _Function(node.name, stub, documentation.partition("\n\n")[0], text)


def _paragraphs(documentation: str) -> Iterator[str]:
    """As many whole paragraphs at a time as `MOST_CHARACTERS` allow."""
    kept = ""
    for paragraph in [*documentation.split("\n\n"), ""]:
        if kept and (not paragraph or len(kept) + len(paragraph) > MOST_CHARACTERS):
            if 200 <= len(kept) <= MOST_CHARACTERS:
                yield kept
            kept = ""
        kept += ("\n\n" if kept else "") + paragraph
