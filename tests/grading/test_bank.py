"""The bank of wrong answers has the degenerate ones: right in value, and not what the exercise asks for."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from dtlib.grading import all_exercises

from .bank import right_answers, wrong_answers

BANK = wrong_answers()
REAL_PASSES = ("activations.4", "activations.5")
SHARDED = ("zero.3", "zero.4", "zero.5", "zero.6")
MESSAGES = ("collectives.4", "collectives.5", "collectives.6")
PAPER = [exercise.id for exercise in all_exercises().values() if exercise.harness == "paper.call"]

# Which of the degenerate answers an exercise can have, as the check and the mistake that reject them.
DEGENERATE = {
    "replicated instead of sharded": {
        "collectives.1": ("reduce_scatter", "all-reduce for reduce-scatter"),
        "collectives.5": ("values", "all-reduce"),
        "zero.1": ("weights", "never split"),
        "zero.3": ("shard", "the whole as a shard"),
        "zero.4": ("memory", "replicated states"),
        "zero.5": ("memory", "gradients never freed"),
        "zero.6": ("memory", "full parameters kept after forward"),
    },
    "all-reduced instead of reduce-scattered": {
        "zero.2": ("gradients", "all-reduce at every stage"),
        "zero.4": ("traffic", "all-reduce, then all-gather"),
        "zero.5": ("traffic", "all-reduce"),
        "zero.6": ("order", "all-reduce for reduce-scatter"),
    },
    "kept, and not needed any more": {
        "zero.3": ("memory", "everything is kept"),
        "zero.4": ("memory", "a buffer of full length"),
        "zero.6": ("memory", "full gradients kept"),
        "memory.5": ("at rest", "gradients kept"),
        "memory.6": ("at rest", "something else kept"),
        "activations.4": ("kept", "as autograd keeps it"),
        "activations.5": ("kept", "everything kept"),
    },
    "everything at once": {
        "zero.5": ("memory", "reduced after backward"),
        "memory.5": ("peak", "both copies of all gradients"),
        "memory.6": ("peak", "all gradients at once"),
    },
    "put aside where nobody counts": {
        "zero.3": ("memory", "kept as numbers"),
        "memory.5": ("at rest", "kept out of torch's sight"),
        "memory.6": ("peak", "kept out of torch's sight"),
        "activations.4": ("kept", "kept out of autograd's sight"),
        "activations.5": ("kept", "kept out of autograd's sight"),
    },
    "torch's own checkpoint": dict.fromkeys(REAL_PASSES, ("own work", "torch's checkpoint called")),
    "computed too often": {
        "activations.5": ("recompute", "computed again more than once"),
    },
    "measured, not predicted": {
        "activations.2": ("own prediction", "measured, not predicted"),
    },
    "blocking instead of overlapped": {
        "dp.3": ("exposed", "sync starts after backward"),
        "dp.6": ("overlap", "blocking in the hook"),
    },
    "gathered and added instead of a ring": {
        "collectives.5": ("traffic", "whole buffers"),
        "collectives.6": ("traffic", "whole buffers"),
        "dp.4": ("traffic", "gathered, then added"),
        "dp.5": ("traffic", "gathered, then added"),
        "dp.6": ("traffic", "gathered, then added"),
        "zero.4": ("traffic", "everything gathered"),
        "zero.5": ("traffic", "everything gathered"),
        "zero.7": ("one number", "gradients gathered"),
    },
    "one rank does the work": {
        "collectives.4": ("rounds", "the root sends to everybody"),
        "collectives.5": ("traffic", "one rank does the work"),
        "collectives.6": ("traffic", "one rank does the work"),
    },
    "the built-in": dict.fromkeys((*MESSAGES, "dp.5", "dp.6", *SHARDED), ("own work", "built-in called")),
    "the built-in through its backend": dict.fromkeys((*MESSAGES, "dp.5", "dp.6"), ("own work", "around the record")),
    "the library on ranks": dict.fromkeys(
        (*MESSAGES, "dp.4", "dp.5", "dp.6", *SHARDED, "zero.7", *REAL_PASSES), ("own work", "library called")
    ),
    "the library on paper": dict.fromkeys(PAPER, ("own formula", "library called")),
    "N times the bytes": {
        "collectives.2": ("bytes", "whole buffers around the ring"),
        "collectives.3": ("powers of two", "ring sends whole buffers"),
        "collectives.4": ("traffic", "everybody sends to everybody"),
        "collectives.5": ("traffic", "whole buffers"),
        "collectives.6": ("traffic", "whole buffers"),
        "dp.2": ("sync time", "whole buffers around the ring"),
        "dp.4": ("traffic", "two all-reduces"),
        "dp.5": ("traffic", "a sync for each micro-batch"),
        "dp.6": ("traffic", "everything twice"),
        "zero.2": ("gradients", "all ranks together"),
        "zero.3": ("traffic", "whole buffers gathered"),
    },
    "right for two ranks only": {
        "collectives.1": ("reduce_scatter", "right for two ranks only"),
        "collectives.2": ("bytes", "right for two ranks only"),
        "collectives.4": ("values", "right for two ranks only"),
        "collectives.5": ("values", "right for two ranks only"),
        "collectives.6": ("sum", "right for two ranks only"),
        "dp.1": ("mean gradient", "right for two workers only"),
        "dp.4": ("gradient", "right for two ranks only"),
        "dp.5": ("gradient", "right for two ranks only"),
        "dp.6": ("gradient", "right for two ranks only"),
    },
    "right for convenient numbers only": {
        "memory.1": ("attention", "a key for each query"),
        "memory.2": ("weights and gradients", "two bytes for everything"),
        "memory.3": ("hfu", "always a third more"),
        "memory.4": ("rows", "right for even shares only"),
        "memory.5": ("small updates", "small updates lost"),
        "memory.6": ("weights", "a frozen parameter"),
        "activations.1": ("attention", "always two bytes"),
        "activations.2": ("chains", "always two bytes"),
        "activations.3": ("best plan", "√l"),
        "activations.5": ("gradient", "one memory for all layers"),
        "activations.6": ("fits", "a plan where there is none"),
        "collectives.1": ("all_to_all", "one number for each chunk"),
        "collectives.3": ("other ranks", "log2 without rounding up"),
        "collectives.4": ("values", "right for powers of two only"),
        "collectives.5": ("values", "right for divisible lengths only"),
        "collectives.6": ("any length", "right for divisible lengths only"),
        "dp.1": ("mean gradient", "right for four workers only"),
        "dp.2": ("sync time", "two bytes for each parameter"),
        "dp.4": ("gradient", "a rank without tokens"),
        "dp.6": ("buckets", "full taken for too full"),
        "zero.1": ("uneven shares", "a mean over the ranks"),
        "zero.2": ("gradients", "one sync at every stage"),
        "zero.3": ("rebuilt", "right for divisible lengths only"),
        "zero.4": ("weights", "some weights never move"),
        "zero.5": ("gradient", "a frozen parameter"),
        "zero.6": ("outputs", "right for divisible lengths only"),
        "zero.7": ("clipped", "scaled up"),
    },
}


@pytest.mark.parametrize("kind", DEGENERATE)
def test_degenerate_answers_are_in_the_bank(kind: str):
    known = {(wrong.exercise, wrong.check, wrong.mistake) for wrong in BANK}
    wanted = {(name, *rejected) for name, rejected in DEGENERATE[kind].items()}
    assert wanted <= known


def test_answers_have_names_of_their_own_and_can_be_read():
    titles = Counter((wrong.exercise, wrong.title) for wrong in BANK)
    assert [title for title, count in titles.items() if count > 1] == []
    sources = Counter((wrong.exercise, wrong.source) for wrong in BANK)
    assert [name for (name, _), count in sources.items() if count > 1] == []
    for answer in (*BANK, *right_answers()):
        functions = {node.name for node in ast.walk(ast.parse(answer.source)) if isinstance(node, ast.FunctionDef)}
        assert all_exercises()[answer.exercise].function in functions, answer.title


def test_mistakes_have_names_of_their_own_and_feedback_that_asks():
    for exercise in all_exercises().values():
        for check in exercise.checks:
            names = [mistake.name for mistake in check.mistakes]
            assert len(set(names)) == len(names), (exercise.id, check.name)
            for mistake in check.mistakes:
                assert mistake.feedback.rstrip().endswith((".", "?")), (exercise.id, check.name, mistake.name)
                assert len(mistake.feedback.split()) >= 6, (exercise.id, check.name, mistake.name)
